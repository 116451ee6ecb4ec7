"""Which restore a request gets on each stage: what it asks for first tells."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.simulator.beliefs import Beliefs
from cacheflow_sgl.core.simulator.builder import Builder
from cacheflow_sgl.core.simulator.jobs import Progress
from cacheflow_sgl.core.simulator.requests import Found, Request
from cacheflow_sgl.core.simulator.restores import Forward, Load, Restore
from cacheflow_sgl.core.simulator.setup import Boundary, Engine, Setup
from cacheflow_sgl.core.staircase import HOLE
from tests.core.simulator.worlds import CHUNK, CHUNK_BYTES, LAYERS, cost, link, world

DEVICE = 3 * CHUNK
MINE = world(cost(), link(2.0), link(2.0), boundary_bytes_per_token=4)


def stages(*tiers: int, **setup: Any) -> list[Progress]:
    """How a request begins that has a prefix in these tiers behind three chunks on the device."""
    builder = Builder(MINE, Setup(**setup), Beliefs.exact(MINE))
    prompt = DEVICE + len(tiers) * CHUNK + 40
    return builder.stages(Request(0, 0.0, prompt), Found(DEVICE, tiers), 7.0)


def restores(*tiers: int, **setup: Any) -> list[Restore]:
    each = [progress.restore for progress in stages(*tiers, **setup)]
    assert all(restore is not None for restore in each)
    return [restore for restore in each if restore is not None]


def first_forward(restore: Restore) -> Forward:
    forward = restore.next_forward((0.0, 0.0))
    assert forward is not None
    return forward


def first_load(restore: Restore) -> Load:
    load = restore.next_load(restore.load_tiers[0], 0.0)
    assert load is not None
    return load


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_without_a_prefix_the_suffix_may_start_at_once(engine: Engine, count: int) -> None:
    begins = stages(engine=engine, stages=count)
    assert len(begins) == count
    for begin in begins:
        assert (begin.restore, begin.suffix_at, begin.suffix_from_s) == (None, DEVICE, 7.0)


def test_recompute_has_no_prefix_but_that_of_the_device() -> None:
    (begin,) = stages(0, 0, 0, engine=Engine.RECOMPUTE)
    assert (begin.restore, begin.suffix_at, begin.suffix_from_s) == (None, DEVICE, 7.0)


@pytest.mark.parametrize("engine", [Engine.CAKE, Engine.V1, Engine.STAIRCASE])
def test_a_prefix_is_brought_back_with_its_holes(engine: Engine) -> None:
    (begin,) = stages(0, HOLE, 0, engine=engine)
    assert begin.restore is not None
    assert not begin.restore.complete
    assert (begin.suffix_at, begin.suffix_from_s) == (DEVICE + 3 * CHUNK, math.inf)


def test_load_stops_at_the_first_hole() -> None:
    (begin,) = stages(0, 0, HOLE, 0, engine=Engine.LOAD)
    assert begin.restore is not None and begin.restore.closing
    assert begin.suffix_at == DEVICE + 2 * CHUNK
    load = first_load(begin.restore)
    assert (load.span, load.nbytes) == (Span(DEVICE, DEVICE + 2 * CHUNK), 2 * CHUNK_BYTES)
    (nothing,) = stages(HOLE, 0, engine=Engine.LOAD)
    assert (nothing.restore, nothing.suffix_at) == (None, DEVICE)


def test_cake_loads_whole_chunks_from_the_tail() -> None:
    (restore,) = restores(0, 0, 0, 0, engine=Engine.CAKE)
    load, forward = first_load(restore), first_forward(restore)
    assert load.span == Span(DEVICE + 3 * CHUNK, DEVICE + 4 * CHUNK)
    assert load.stop_layer - load.first_layer == LAYERS
    assert (forward.span, forward.layers) == (Span(DEVICE, DEVICE + CHUNK), LAYERS)


@pytest.mark.parametrize(("chunks", "by_layers"), [(4, True), (5, False)])
def test_v1_goes_by_layers_up_to_its_threshold(chunks: int, by_layers: bool) -> None:
    """A load of less than a chunk takes less layers or less tokens."""
    (restore,) = restores(*[0] * chunks, engine=Engine.V1, layer_threshold=4 * CHUNK)
    first_forward(restore)
    load = first_load(restore)
    assert load.nbytes < CHUNK_BYTES
    assert (load.stop_layer - load.first_layer < LAYERS) == by_layers
    assert (load.span.tokens < CHUNK) != by_layers


def test_stages_have_their_share_of_layers_and_bytes() -> None:
    each = restores(0, 0, stages=2, engine=Engine.LOAD)
    for restore in each:
        load = first_load(restore)
        assert (load.first_layer, load.stop_layer) == (0, LAYERS // 2)
        assert load.nbytes == CHUNK_BYTES


@pytest.mark.parametrize("boundary", Boundary)
def test_only_later_stages_with_stored_boundaries_load_them(boundary: Boundary) -> None:
    each = restores(0, 0, 0, 0, stages=4, boundary=boundary)
    stored = boundary is Boundary.EXACT
    assert [first_load(restore).what for restore in each] == [
        "load",
        *["boundary" if stored else "load"] * 3,
    ]


@pytest.mark.parametrize(
    ("boundary", "can"),
    [
        (Boundary.EXACT, [True, False, False, False]),  # their inputs are not loaded yet
        (Boundary.OFF, [True, False, False, False]),  # nor computed
        (Boundary.OFF_SERIAL, [True] * 4),  # the scheduler lets them wait
    ],
)
def test_what_a_stage_may_compute_at_once(boundary: Boundary, can: list[bool]) -> None:
    each = restores(*[0] * 8, stages=4, boundary=boundary)
    assert [restore.next_forward((0.0, 0.0)) is not None for restore in each] == can


def test_off_follows_the_stage_right_before() -> None:
    each = restores(*[0] * 8, stages=4, boundary=Boundary.OFF)
    first_forward(each[0]).ended()
    assert [restore.next_forward((0.0, 0.0)) is not None for restore in each[2:]] == [False] * 2
    forward = first_forward(each[1])
    assert (forward.span, forward.layers) == (Span(DEVICE, DEVICE + CHUNK), LAYERS // 4)
    forward.ended()
    assert each[2].next_forward((0.0, 0.0)) is not None
    assert each[3].next_forward((0.0, 0.0)) is None
