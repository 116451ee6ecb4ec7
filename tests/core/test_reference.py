"""The optimum against all schedules, and the regret of every batch policy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core import reference
from cacheflow_sgl.core.batch import Batch, BatchPolicyName, batch
from cacheflow_sgl.core.bounds import batch_mean_bound
from cacheflow_sgl.core.reference import Curve, executed, optimum


@st.composite
def curves(draw: st.DrawFn, most_cells: int = 4) -> Curve:
    cells = draw(st.integers(1, most_cells))
    steps = st.lists(st.integers(0, 9), min_size=cells, max_size=cells)
    compute, load = np.array(draw(steps)), np.array(draw(steps))
    return Curve(
        np.concatenate([[0.0], np.cumsum(compute)]),
        np.concatenate([np.cumsum(load[::-1])[::-1], [0.0]]),
        float(draw(st.integers(1, 5))),
    )


def walk(
    batch_of: Sequence[Curve], computing: Sequence[int], loading: Sequence[int], splits: tuple
) -> float:
    """Mean first token, second by second: each lane serves its order, whoever can be served.

    A prefix may be interrupted, a suffix not; nor does it overtake that of another.
    """
    prefix = [int(curve.compute_s[at]) for curve, at in zip(batch_of, splits, strict=True)]
    suffix = [int(curve.suffix_s) for curve in batch_of]
    link, loaded = 0.0, [0.0] * len(batch_of)
    for each in loading:
        if load_s := batch_of[each].load_s[splits[each]]:
            link += load_s
            loaded[each] = link
    now, total = 0, 0
    while any(suffix):
        for each in computing:
            if prefix[each]:
                prefix[each] -= 1
                break
            first = not any(suffix[other] for other in computing[: computing.index(each)])
            if suffix[each] and first and loaded[each] <= now:
                now += suffix[each] - 1
                suffix[each] = 0
                total += now + 1
                break
        now += 1
    return total / len(batch_of)


def best_walk(batch_of: Sequence[Curve]) -> float:
    orders = list(permutations(range(len(batch_of))))
    ways = [range(curve.cells + 1) for curve in batch_of]
    return min(
        walk(batch_of, computing, loading, splits)
        for computing, loading, splits in product(orders, orders, product(*ways))
    )


@settings(deadline=None, max_examples=25)
@given(st.lists(curves(most_cells=3), min_size=1, max_size=2) | st.lists(curves(1), max_size=3))
def test_no_schedule_is_better_than_the_optimum(batch_of: list[Curve]) -> None:
    if not batch_of:
        return
    best = optimum(batch_of)
    assert best.mean_s == pytest.approx(best_walk(batch_of))
    assert best.mean_s == pytest.approx(walk(batch_of, best.order, best.order, best.splits))
    assert best.bound_s == best.mean_s


@pytest.mark.parametrize("block", [1, 256])
def test_the_optimum_of_many_batches_of_three(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(reference, "_BLOCK", block)
    rng = np.random.default_rng(block)
    for _ in range(80):
        batch_of = []
        for _ in range(3):
            compute, load = rng.integers(0, 7, 2), rng.integers(0, 7, 2)
            compute_s = np.array([0.0, compute[0], compute.sum()])
            load_s = np.array([load.sum(), load[1], 0.0])
            batch_of.append(Curve(compute_s, load_s, float(rng.integers(1, 5))))
        best = optimum(batch_of)
        ways = product(permutations(range(3)), product(range(3), repeat=3))
        assert best.mean_s == min(walk(batch_of, order, order, splits) for order, splits in ways)


def test_a_narrow_beam_says_how_far_it_may_be_off() -> None:
    rng = np.random.default_rng(4)
    worse = 0
    for _ in range(20):
        batch_of = random_batch(rng, 4)
        wide, narrow = optimum(batch_of), optimum(batch_of, beam=1)
        assert narrow.bound_s <= wide.mean_s * (1 + 1e-9)
        assert wide.mean_s <= narrow.mean_s * (1 + 1e-9)
        worse += narrow.mean_s > wide.mean_s * (1 + 1e-6)
    assert worse


@settings(deadline=None, max_examples=40)
@given(st.lists(curves(), min_size=1, max_size=4), st.sampled_from(BatchPolicyName))
def test_no_policy_beats_optimum_or_bound(batch_of: list[Curve], name: BatchPolicyName) -> None:
    mean_s = np.mean(executed(batch_of, name))
    options = [(curve.compute_s, curve.load_s, curve.suffix_s) for curve in batch_of]
    best = optimum(batch_of)
    assert best.mean_s <= mean_s + 1e-9
    assert batch_mean_bound(options) <= best.bound_s + 1e-9


def even(cells: int, compute_s: float, load_s: float, suffix_s: float) -> Curve:
    return Curve(np.linspace(0, compute_s, cells + 1), np.linspace(load_s, 0, cells + 1), suffix_s)


def test_the_executor_by_hand() -> None:
    two = [even(4, 4.0, 4.0, 1.0), even(2, 2.0, 2.0, 1.0)]
    assert executed(two, "recompute") == [5.0, 8.0]
    # Loads end at 4 and 6; suffixes follow.
    assert executed(two, "load") == [5.0, 7.0]
    # Both lanes do the first by 2. While its suffix runs, the link brings a cell of the second.
    assert executed(two, "fifo") == [3.0, 5.0]
    # The short one first: 1 + 1; the link is a cell ahead with the other, 3 cells are left.
    assert executed(two, "cacheflow") == [5.0, 2.0]
    # Its link turns to the other at every claim.
    assert executed(two, "cake") == [4.0, 5.0]


def test_arrivals_are_waited_for() -> None:
    late = [even(2, 2.0, 2.0, 1.0)] * 2
    assert executed(late, "fifo", [0.0, 10.0]) == [2.0, 2.0]


def test_a_policy_that_serves_nobody_is_told() -> None:
    class Idle(Batch):
        def next_compute(self, now_s: float) -> None:
            return None

    with pytest.raises(RuntimeError, match="leaves 1 requests"):
        executed([even(2, 2.0, 2.0, 1.0)], Idle())


def test_compute_waits_for_a_load_rather_than_begin_a_long_step() -> None:
    # The short one's last cell lands at 1.5; at 1 compute could begin a step of 20.
    two = [even(2, 2.0, 3.0, 1.0), even(2, 40.0, 40.0, 1.0)]
    assert executed(two, "cacheflow")[0] == 2.5
    assert executed(two, "fifo")[0] == 22.0


@pytest.mark.parametrize(
    ("compute_s", "load_s", "suffix_s"),
    [
        ([0.0], [0.0], 1.0),
        ([0.0, 1.0], [1.0, 0.5, 0.0], 1.0),
        ([0.5, 1.0], [1.0, 0.0], 1.0),
        ([0.0, 1.0], [1.0, 0.5], 1.0),
        ([0.0, 2.0, 1.0], [2.0, 1.0, 0.0], 1.0),
        ([0.0, 1.0, 2.0], [1.0, 2.0, 0.0], 1.0),
        ([0.0, 1.0], [1.0, 0.0], -1.0),
    ],
)
def test_impossible_curves_are_refused(
    compute_s: list[float], load_s: list[float], suffix_s: float
) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(np.array(compute_s), np.array(load_s), suffix_s)


def test_an_optimum_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one request"):
        optimum([])


# -- regret

_CELLS = 16
_TOKEN_S = 5e-5


def random_batch(rng: np.random.Generator, count: int) -> list[Curve]:
    """Mixed requests on one machine: 512 to 64k cached tokens, 64 to 1024 new ones.

    Loading 32k tokens takes a quarter of to 4 times what recomputing them does; a token's compute
    cost is even, or grows with its place and has doubled at 32k.
    """
    growth = float(rng.choice([0.0, 1.0])) / 32768
    balance = 4.0 ** rng.uniform(-1, 1)
    load_token_s = _TOKEN_S * (1 + growth * 16384) / balance

    def compute_s(tokens: np.ndarray) -> np.ndarray:
        return _TOKEN_S * (tokens + growth * tokens**2 / 2)

    batch_of = []
    for _ in range(count):
        tokens = int(512 * 128 ** rng.uniform(0, 1))
        edges = np.linspace(0, tokens, _CELLS + 1)
        ends = compute_s(np.array([tokens, tokens + rng.integers(64, 1025)]))
        load_s = load_token_s * (tokens - edges)
        batch_of.append(Curve(compute_s(edges), load_s, float(ends[1] - ends[0])))
    return batch_of


def test_cacheflow_is_near_the_optimum() -> None:
    rng = np.random.default_rng(25)
    regrets: dict[str, list[float]] = {name: [] for name in BatchPolicyName}
    for number in range(200):
        batch_of = random_batch(rng, int(rng.integers(2, 7)))
        best = optimum(batch_of, beam=16)
        for name, seen in regrets.items():
            if name == "cacheflow" or number < 25:
                seen.append(np.mean(executed(batch_of, batch(name))) / best.mean_s - 1)
    print("\nregret of mean TTFT (cacheflow: 200 batches, others 25): mean, p95, worst")
    for name, seen in regrets.items():
        print(f"{name:>34} {np.mean(seen):7.1%} {np.quantile(seen, 0.95):7.1%} {max(seen):7.1%}")
    assert np.mean(regrets["cacheflow"]) < 0.03
    assert max(regrets["cacheflow"]) < 0.10
    others = [np.mean(seen) for name, seen in regrets.items() if name != "cacheflow"]
    assert min(others) > 0.2
