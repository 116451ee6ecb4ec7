"""How long plans and claims take: medians are printed, nothing is asserted about them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import thread_time

import pytest

from cacheflow_sgl.core.cells import CellClaims
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.staircase import (
    HOLE,
    layer_plan,
    lower_bound,
    staircase_plan,
    token_plan,
)
from tests.core.test_staircase import long_grid, part

pytestmark = pytest.mark.bench


def median_ms(work: Callable[[], object], repeats: int = 15) -> float:
    """Of processor time: others may share the cores."""
    seconds = []
    for _ in range(repeats):
        started = thread_time()
        work()
        seconds.append(thread_time() - started)
    return 1e3 * median(seconds)


@pytest.mark.parametrize(("chunks", "layers"), [(8, 36), (64, 64), (256, 80)])
@pytest.mark.parametrize("kind", ["one link", "two links", "two links, holes"])
def test_speed_of_plans(chunks: int, layers: int, kind: str) -> None:
    tier, rates = [0] * chunks, (1.0,)
    if kind != "one link":
        tier, rates = [0] * (chunks // 2) + [1] * (chunks - chunks // 2), (1.0, 0.5)
    if "holes" in kind:
        tier[:: chunks // 4] = [HOLE] * len(tier[:: chunks // 4])
    grid = long_grid(tier, rates, layers)
    plan = staircase_plan(grid)
    rest = part(grid, 1, chunks - 1)
    ways: dict[str, Callable[[], object]] = {
        "staircase": lambda: staircase_plan(grid),
        "again": lambda: staircase_plan(rest, plan),
        "token": lambda: token_plan(grid),
        "layer": lambda: layer_plan(grid),
        "bound": lambda: lower_bound(grid),
    }
    times = ", ".join(f"{name} {median_ms(work):.2f} ms" for name, work in ways.items())
    above = plan.seconds / lower_bound(grid) - 1
    print(f"\n{chunks} x {layers}, {kind}: {times}; {above:.2%} above the bound")


@pytest.mark.parametrize("load_layers", [1, 8, 64])
def test_speed_of_claims(load_layers: int) -> None:
    spans = [Span(512 * j, 512 * j + 512) for j in range(64)]
    counts = []

    def restore() -> None:
        cells = CellClaims(spans, 64, [0] * 64)
        count = 0
        while not cells.finished:
            computed, loaded = cells.claim_compute(64), cells.claim_load(load_layers, 0)
            count += (computed is not None) + (loaded is not None)
            if computed is not None:
                cells.computed(computed)
            if loaded is not None:
                cells.landed(loaded)
        counts.append(count)

    each_us = 1e3 * median_ms(restore) / counts[0]
    print(f"\nloads of {load_layers} layers: {each_us:.1f} us a claim and its end")
