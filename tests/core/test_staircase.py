"""Plans over chunk x layer: against a walk through time, against all splits, and their bound."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from cacheflow_sgl.core import staircase
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.staircase import (
    HOLE,
    Grid,
    Staircase,
    layer_plan,
    lower_bound,
    makespan,
    staircase_plan,
    token_plan,
)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def grid_of(compute_s: Floats, load_s: Floats, tier: list[int] | None = None) -> Grid:
    return Grid(
        np.asarray(compute_s, dtype=np.float64),
        np.asarray(load_s, dtype=np.float64),
        np.array(tier or [0] * len(compute_s), dtype=np.int64),
    )


def uniform(chunk_s: Floats, layer_load_s: float, layers: int) -> Grid:
    """Every layer of a chunk costs the same, every cell takes the same time to load."""
    through = np.arange(layers + 1)
    load_s = np.tile(layer_load_s * (layers - through), (len(chunk_s), 1))
    return grid_of(chunk_s[:, None] * through, load_s)


def all_splits(grid: Grid) -> Ints:
    """Every staircase of a small grid, (n, J)."""

    def behind(j: int, before: int) -> Iterator[tuple[int, ...]]:
        if j == grid.chunks:
            yield ()
            return
        hole = grid.tier[j] == HOLE
        for k in (grid.layers,) if hole else range(before + 1):
            for rest in behind(j + 1, k):
                yield (k, *rest)

    return np.array(list(behind(0, grid.layers)))


def best_of_all(grid: Grid) -> float:
    return float(grid.paths(all_splits(grid)).max(axis=(1, 2)).min())


def random_grid(rng: np.random.Generator, links: int = 2, holes: float = 0.25) -> Grid:
    """A small one: costs per forward and per load, boundary bytes, links of different rates."""
    chunks, layers = rng.integers(1, 6, 2)
    through = np.arange(layers + 1)
    per_layer = rng.uniform(0.1, 1, (chunks, 1))
    if rng.random() < 0.7:
        per_layer.sort(axis=0)
    tier = rng.integers(0, links, chunks)
    tier[rng.random(chunks) < holes] = HOLE
    base, latency = rng.uniform(0, 0.5), rng.uniform(0, 0.3)
    boundary = rng.uniform(0, 1) * rng.integers(0, 2)
    left = layers - through + boundary * (through > 0)
    load_s = rng.uniform(0.1, 2, links)[tier][:, None] * left
    return Grid(per_layer * through + base * (through > 0), load_s + latency * (load_s > 0), tier)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Small ones of whole seconds, with any costs; more layers never cost less."""
    chunks, layers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    steps = st.lists(st.integers(0, 3), min_size=chunks * layers, max_size=chunks * layers)
    compute_s = np.zeros((chunks, layers + 1))
    compute_s[:, 1:] = np.reshape(draw(steps), (chunks, layers)).cumsum(axis=1)
    load_s = np.zeros((chunks, layers + 1))
    load_s[:, :-1] = np.reshape(draw(steps), (chunks, layers))[:, ::-1].cumsum(axis=1)[:, ::-1]
    load_s[:, 1:] += draw(st.integers(0, 2))
    tier = draw(st.lists(st.integers(HOLE, 2), min_size=chunks, max_size=chunks))
    return grid_of(compute_s, load_s, tier)


def walked(grid: Grid, split: Ints) -> int:
    """Seconds of a restore, second by second: what each lane is at, and what it may begin."""
    compute = [int(grid.compute_s[j, k]) for j, k in enumerate(split)]
    load = [0 if t == HOLE else int(grid.load_s[j, split[j]]) for j, t in enumerate(grid.tier)]
    first = 0  # chunk of the segment that compute is in
    for second in range(1000):
        while first < grid.chunks:
            stop = first + 1
            while stop < grid.chunks and (grid.tier[stop] != HOLE or grid.tier[stop - 1] == HOLE):
                stop += 1
            if any(compute[first:stop]) or any(load[:stop]):
                break
            first = stop
        if first == grid.chunks:
            return second
        at = next((j for j in range(first, stop) if compute[j]), None)
        if at is not None:
            compute[at] -= 1
        for link in range(3):
            at = next((j for j in range(grid.chunks) if grid.tier[j] == link and load[j]), None)
            if at is not None:
                load[at] -= 1
    raise AssertionError("it never ends")


# -- the grid


def test_a_grid_from_what_forwards_and_links_cost() -> None:
    def forward(starts: Ints, rows: Ints, layers: Ints) -> Floats:
        return 1.0 + layers * (rows * 0.1 + starts * 0.01)

    grid = Grid.of(
        [Span(0, 10), Span(10, 20), Span(20, 24)],
        2,
        forward,
        bytes_per_token_layer=100,
        links=[(0.5, 1000.0), (0.0, 500.0)],
        tier=[HOLE, 0, 1],
        boundary_bytes_per_token=50,
    )
    assert grid.compute_s == pytest.approx(np.array([[0, 2.0, 3.0], [0, 2.1, 3.2], [0, 1.6, 2.2]]))
    assert grid.load_s[1:] == pytest.approx(np.array([[2.5, 2.0, 1.0], [1.6, 1.2, 0.4]]))
    assert (grid.chunks, grid.layers) == (3, 2)


def test_nothing_to_load_has_no_latency() -> None:
    grid = Grid.of(
        [Span(0, 10)],
        1,
        lambda starts, rows, layers: 1.0 * rows * layers,
        bytes_per_token_layer=100,
        links=[(0.5, 1000.0)],
        tier=[0],
    )
    assert grid.load_s.tolist() == [[1.5, 0.0]]


def test_a_tier_without_a_link_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tiers \[0, 1\], but only 1 links"):
        Grid.of(
            [Span(0, 1), Span(1, 2)],
            1,
            lambda starts, rows, layers: 1.0 * rows * layers,
            bytes_per_token_layer=1,
            links=[(0, 1)],
            tier=[0, 1],
        )


@pytest.mark.parametrize(
    ("compute_s", "load_s", "tier", "message"),
    [
        (np.zeros((0, 2)), np.zeros((0, 2)), [], "at least one chunk and one layer"),
        (np.zeros((2, 1)), np.zeros((2, 1)), [0, 0], "at least one chunk and one layer"),
        (np.zeros((2, 2)), np.zeros((2, 3)), [0, 0], "shapes of compute, load and tier differ"),
        (np.zeros((2, 2)), np.zeros((2, 2)), [0], "shapes of compute, load and tier differ"),
        ([[0, np.nan]], [[1, 0]], [0], "compute times must be finite"),
        ([[0, 1]], [[1, -1]], [0], "load times must be finite and not negative"),
        ([[1, 1]], [[1, 0]], [0], "no layer must take no time"),
        ([[0, 1]], [[1, 0]], [-2], "numbered from 0, or -1 for a hole"),
    ],
)
def test_what_is_no_grid_is_refused(
    compute_s: Floats, load_s: Floats, tier: list[int], message: str
) -> None:
    arrays = np.array(compute_s, float), np.array(load_s, float), np.array(tier, np.int64)
    with pytest.raises(ValueError, match=message):
        Grid(*arrays)


def test_segments_begin_at_holes_behind_loadable_chunks() -> None:
    tier = [HOLE, 0, 1, HOLE, HOLE, 1, HOLE]
    grid = grid_of(np.zeros((7, 2)), np.zeros((7, 2)), tier)
    assert grid.segment_starts.tolist() == [0, 3, 6]
    assert grid.segment_stops.tolist() == [3, 6, 7]
    assert grid.segment.tolist() == [0, 0, 0, 1, 1, 1, 2]


# -- the makespan


@given(grids(), st.data())
@settings(max_examples=60, deadline=None)
def test_the_longest_path_is_what_a_walk_through_time_takes(
    grid: Grid, data: st.DataObject
) -> None:
    splits = all_splits(grid)
    split = splits[data.draw(st.integers(0, len(splits) - 1))]
    assert makespan(grid, split.tolist()) == walked(grid, split)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ((2, 2), "3 numbers of layers up to 2"),
        ((2, 3, 0), "3 numbers of layers up to 2"),
        ((2, 2, -1), "3 numbers of layers up to 2"),
        ((1, 1, 0), "loads a hole"),
        ((2, 0, 1), "no staircase"),
    ],
)
def test_what_is_no_staircase_has_no_makespan(split: tuple[int, ...], message: str) -> None:
    grid = grid_of(np.zeros((3, 3)), np.zeros((3, 3)), [HOLE, 0, 0])
    with pytest.raises(ValueError, match=message):
        makespan(grid, split)


def test_behind_a_hole_the_split_may_rise_again() -> None:
    grid = grid_of([[0, 1]] * 3, [[4, 0]] * 3, [0, HOLE, 0])
    assert makespan(grid, (0, 1, 1)) == 4 + 1 + 1


# -- plans


@given(grids())
@settings(max_examples=30, deadline=None)
def test_plans_are_staircases_that_take_as_long_as_they_say(grid: Grid) -> None:
    for plan in (token_plan(grid), layer_plan(grid), staircase_plan(grid)):
        assert plan.seconds == makespan(grid, plan.split)
        each = np.arange(grid.chunks)
        loads = np.where(grid.on_link, grid.load_s[each, plan.split], 0).sum(axis=1)
        assert plan.compute_s == grid.compute_s[each, plan.split].sum()
        assert plan.load_s == loads.max()


@given(grids())
@settings(max_examples=40, deadline=None)
def test_a_staircase_is_between_the_bound_and_the_simpler_plans(grid: Grid) -> None:
    plan = staircase_plan(grid)
    assert plan.seconds <= min(token_plan(grid).seconds, layer_plan(grid).seconds)
    best = best_of_all(grid)
    assert lower_bound(grid) <= best + 1e-9
    assert best <= plan.seconds


def test_token_and_layer_plans_are_the_best_of_their_kind() -> None:
    rng = np.random.default_rng(2)
    for _ in range(80):
        grid = random_grid(rng)
        splits = all_splits(grid)
        seconds = grid.paths(splits).max(axis=(1, 2))
        tokens = np.isin(splits, (0, grid.layers)).all(axis=1)
        loadable = splits[:, ~grid.holes]
        layers = (loadable == loadable[:, :1]).all(axis=1)
        assert layer_plan(grid).seconds == pytest.approx(seconds[layers].min())
        if len(grid.segment_starts) == 1:
            assert token_plan(grid).seconds == pytest.approx(seconds[tokens].min())
        else:
            assert token_plan(grid).seconds <= 1.2 * seconds[tokens].min()


def test_with_costs_uniform_over_layers_it_is_the_best_of_all() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        chunks, layers = rng.integers(1, 6, 2)
        grid = uniform(np.sort(rng.uniform(0.1, 1, chunks)), rng.uniform(0.05, 1), layers)
        assert staircase_plan(grid).seconds == pytest.approx(best_of_all(grid), rel=1e-12)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=30).map(sorted),
    st.integers(1, 6),
    st.integers(1, 24),
)
@settings(max_examples=25, deadline=None)
def test_so_it_is_where_there_are_too_many_to_try(
    chunk_s: list[int], layer_load_s: int, layers: int
) -> None:
    # Cells computed from the front are the cheapest ones: only their number is to be chosen.
    cells = np.append(0, np.repeat(chunk_s, layers)).cumsum()
    loads = layer_load_s * np.arange(len(cells))[::-1]
    grid = uniform(np.array(chunk_s, float), layer_load_s, layers)
    assert staircase_plan(grid).seconds == np.maximum(cells, loads).min()


@pytest.mark.parametrize(("links", "holes"), [(1, 0.0), (2, 0.0), (2, 0.25), (3, 0.25)])
def test_with_any_costs_it_is_near_the_best_of_all(links: int, holes: float) -> None:
    rng = np.random.default_rng(links)
    grids = [random_grid(rng, links, holes) for _ in range(80)]
    gaps = np.array([staircase_plan(grid).seconds / best_of_all(grid) - 1 for grid in grids])
    print(f"{links} links, holes {holes}: mean {gaps.mean():.3%}, worst {gaps.max():.1%}")
    assert gaps.min() >= -1e-9
    assert gaps.mean() < 0.01


def long_grid(tier: list[int], rates: tuple[float, ...], layers: int = 32) -> Grid:
    """Chunks of 512 tokens; attention grows, loads of all take as long as compute."""
    chunks = [Span(512 * j, 512 * j + 512) for j in range(len(tier))]

    def forward(starts: Ints, rows: Ints, layers: Ints) -> Floats:
        return 0.002 + rows * layers * (1e-6 + starts * 2e-11)

    whole_s = sum(float(forward(*np.array([[c.start], [512], [layers]])).item()) for c in chunks)
    rate = len(tier) * 512 * layers * 4096 / whole_s
    return Grid.of(
        chunks,
        layers,
        forward,
        bytes_per_token_layer=4096,
        links=[(1e-4, share * rate) for share in rates],
        tier=tier,
        boundary_bytes_per_token=8192,
    )


@pytest.mark.parametrize(
    ("tier", "rates", "within"),
    [
        ([0] * 64, (1.0,), 0.005),
        ([0] * 32 + [1] * 32, (1.0, 0.5), 0.1),
        ([0, 0, 0, HOLE] * 16, (1.0,), 0.005),
        (([0] * 10 + [HOLE] + [1] * 10) * 3, (0.7, 0.4), 0.03),
    ],
)
def test_a_long_restore_is_near_its_bound(
    tier: list[int], rates: tuple[float, ...], within: float
) -> None:
    grid = long_grid(tier, rates)
    plan, bound = staircase_plan(grid), lower_bound(grid)
    print(f"{plan.seconds / bound - 1:.2%} above the bound")
    assert bound <= plan.seconds <= (1 + within) * bound


def test_the_bound_is_the_best_mixture_of_splits() -> None:
    rng = np.random.default_rng(4)
    for number in range(30):
        grid = random_grid(rng, links=1 + number % 3)
        paths = grid.paths(all_splits(grid))
        paths = paths.reshape(len(paths), -1).T
        # The least z with sum of q_i * path_i <= z on every path, sum of q_i = 1.
        best = linprog(
            np.append(1, np.zeros(paths.shape[1])),
            A_ub=np.hstack([-np.ones((len(paths), 1)), paths]),
            b_ub=np.zeros(len(paths)),
            A_eq=[[0] + [1] * paths.shape[1]],
            b_eq=[1],
        )
        assert lower_bound(grid) == pytest.approx(best.fun, rel=2e-6)


def test_the_cheapest_descent_is_the_cheapest_of_all() -> None:
    rng = np.random.default_rng(5)
    for _ in range(100):
        chunks, layers = rng.integers(1, 5, 2)
        costs = rng.uniform(0, 1, (chunks, layers + 1))
        descents = [
            ks
            for ks in product(range(layers + 1), repeat=chunks)
            if list(ks) == sorted(ks, reverse=True)
        ]
        each = np.arange(chunks)
        split = staircase._cheapest_descent(costs)
        assert tuple(split) in descents
        least = min(costs[each, ks].sum() for ks in descents)
        assert costs[each, split].sum() == pytest.approx(least)


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_clamps_take_as_long_as_is_said_of_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = random_grid(rng, holes=0.4)
    split = rng.choice(all_splits(grid))
    raised_s, lowered_s = staircase._clamped_s(grid, split, grid.paths(split))
    for j, k in product(range(grid.chunks), range(grid.layers + 1)):
        first = grid.segment_starts[grid.segment[j]]
        stop = grid.segment_stops[grid.segment[j]]
        raised, lowered = split.copy(), split.copy()
        raised[first : j + 1] = np.maximum(raised[first : j + 1], k)
        lowered[j:stop] = np.minimum(lowered[j:stop], k)
        assert raised_s[j, k] == pytest.approx(makespan(grid, raised.tolist()))
        if not grid.holes[j]:
            assert lowered_s[j, k] == pytest.approx(makespan(grid, lowered.tolist()))


def test_a_restore_that_takes_no_time() -> None:
    grid = grid_of(np.zeros((3, 3)), np.zeros((3, 3)), [HOLE, 0, 1])
    assert staircase_plan(grid).seconds == 0
    assert lower_bound(grid) == 0


def test_holes_alone_are_computed() -> None:
    grid = grid_of([[0, 1, 2]] * 3, [[9, 9, 9]] * 3, [HOLE] * 3)
    assert staircase_plan(grid) == Staircase((2, 2, 2), 6.0, 6.0, 0.0)
    assert lower_bound(grid) == pytest.approx(6)


def test_one_chunk_is_split_by_layers() -> None:
    assert staircase_plan(uniform(np.array([1.0]), 1.0, 8)).split == (4,)


# -- again, later


def part(grid: Grid, first: int, stop: int) -> Grid:
    chunks = slice(first, stop)
    return Grid(grid.compute_s[chunks], grid.load_s[chunks], grid.tier[chunks])


@pytest.mark.parametrize(("first", "stop"), [(3, 64), (0, 60), (2, 62), (0, 64)])
def test_an_earlier_plan_is_taken_up(
    first: int, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = long_grid([0] * 40 + [1] * 24, (1.0, 0.5))
    start = staircase_plan(grid)
    rest = part(grid, first, stop)
    again = staircase_plan(rest)
    monkeypatch.setattr(staircase, "_Dual", None)  # no prices are searched for
    plan = staircase_plan(rest, start)
    assert plan.seconds <= makespan(rest, start.split[first:stop])
    assert plan.seconds <= 1.02 * again.seconds


def test_an_earlier_plan_may_have_another_hole_by_now() -> None:
    grid = long_grid([0] * 20, (1.0,))
    start = staircase_plan(grid)
    tier = grid.tier.copy()
    tier[[5, 16]] = HOLE
    now = Grid(grid.compute_s, grid.load_s, tier)
    plan = staircase_plan(now, start)
    assert plan.seconds == makespan(now, plan.split)
    assert plan.seconds <= 1.02 * staircase_plan(now).seconds


def test_a_plan_of_something_shorter_is_not_taken_up() -> None:
    grid = long_grid([0] * 20, (1.0,))
    assert staircase_plan(grid, token_plan(part(grid, 0, 10))) == staircase_plan(grid)
