"""Bounds: no split of the prefix between the two lanes beats them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from cacheflow_sgl.core.bounds import (
    MeetingPoint,
    StageTimes,
    batch_makespan_bound,
    batch_mean_bound,
    harmonic_bound,
    meeting_point_bound,
    stages_bound,
)

times = st.floats(0, 10)
chunks = st.lists(st.tuples(st.integers(1, 600), times), min_size=1, max_size=12)


def split_s(
    chunk_seconds: list[tuple[int, float]], per_token_s: float, latency_s: float, token: float
) -> float:
    """Time of a split at `token`, by the definition."""
    edges = np.cumsum([0] + [rows for rows, _ in chunk_seconds])
    done = np.cumsum([0.0] + [seconds for _, seconds in chunk_seconds])
    to_load = edges[-1] - token
    load_s = latency_s + to_load * per_token_s if to_load > 0 else 0.0
    return max(float(np.interp(token, edges, done)), load_s)


@settings(deadline=None)
@given(chunks, st.floats(0, 0.05), st.floats(0, 2), st.data())
def test_no_split_is_faster(
    chunk_seconds: list[tuple[int, float]],
    per_token_s: float,
    latency_s: float,
    data: st.DataObject,
) -> None:
    total = sum(rows for rows, _ in chunk_seconds)
    token = data.draw(st.integers(0, total))
    bound = meeting_point_bound(chunk_seconds, per_token_s, load_latency_s=latency_s)
    assert 0 <= bound.token <= total
    assert bound.seconds <= split_s(chunk_seconds, per_token_s, latency_s, token) + 1e-9


@settings(deadline=None)
@given(chunks, st.floats(1e-6, 0.05), st.floats(0, 2))
def test_the_bound_is_reached_at_its_token(
    chunk_seconds: list[tuple[int, float]], per_token_s: float, latency_s: float
) -> None:
    total = sum(rows for rows, _ in chunk_seconds)
    bound = meeting_point_bound(chunk_seconds, per_token_s, load_latency_s=latency_s)
    fine = np.linspace(max(0, bound.token - 0.5), min(total, bound.token + 0.5), 101)
    best = min(split_s(chunk_seconds, per_token_s, latency_s, token) for token in fine)
    steepest = max(per_token_s, *(seconds / rows for rows, seconds in chunk_seconds))
    assert best == pytest.approx(bound.seconds, abs=steepest * 0.02 + 1e-9)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 600), st.floats(1e-4, 10), st.floats(1e-4, 10))
def test_uniform_cost_gives_the_harmonic_bound(
    count: int, rows: int, recompute_s: float, load_s: float
) -> None:
    uniform = [(rows, recompute_s / count)] * count
    bound = meeting_point_bound(uniform, load_s / (count * rows))
    assert bound.seconds == pytest.approx(harmonic_bound(recompute_s, load_s))


def test_dearer_later_chunks_leave_more_to_the_link() -> None:
    rising = [(512, 0.1), (512, 0.2), (512, 0.3), (512, 0.4)]
    even = [(512, 0.25)] * 4
    # 0.1 + 0.2 + 0.3 * x = (2 - x) * 0.25, at x = 4/11
    bound = meeting_point_bound(rising, 0.25 / 512)
    assert bound.seconds == pytest.approx(0.3 + 0.3 * 4 / 11 * 0.5 * 2)
    assert bound.token == round(1024 + 512 * 4 / 11)
    assert bound.seconds < meeting_point_bound(even, 0.25 / 512).seconds


def test_a_link_too_late_for_a_single_token_is_not_used() -> None:
    assert meeting_point_bound([(100, 1.0)], 0.0, load_latency_s=1.5) == MeetingPoint(100, 1.0)


def test_a_link_that_costs_nothing_loads_everything() -> None:
    assert meeting_point_bound([(100, 1.0)], 0.0) == MeetingPoint(0, 0.0)
    assert harmonic_bound(1.0, 0.0) == 0.0


def test_nothing_to_restore_takes_no_time() -> None:
    assert meeting_point_bound([], 0.1) == MeetingPoint(0, 0.0)


@settings(deadline=None)
@given(chunks, st.lists(st.floats(0, 0.05), min_size=2, max_size=2))
def test_a_faster_link_never_raises_the_bound(
    chunk_seconds: list[tuple[int, float]], per_token: list[float]
) -> None:
    for fast, slow in pairwise(sorted(per_token)):
        fast_s = meeting_point_bound(chunk_seconds, fast).seconds
        assert fast_s <= meeting_point_bound(chunk_seconds, slow).seconds + 1e-9


@pytest.mark.parametrize(
    ("chunk_seconds", "per_token_s", "latency_s"),
    [([(0, 1.0)], 0.1, 0.0), ([(1, -1.0)], 0.1, 0.0), ([(1, 1.0)], -0.1, 0.0), ([], 0.1, -1.0)],
)
def test_impossible_measurements_are_refused(
    chunk_seconds: list[tuple[int, float]], per_token_s: float, latency_s: float
) -> None:
    with pytest.raises(ValueError, match=r"row|negative"):
        meeting_point_bound(chunk_seconds, per_token_s, load_latency_s=latency_s)
    with pytest.raises(ValueError, match="negative"):
        harmonic_bound(-1.0, 1.0)


def test_the_slowest_stage_counts() -> None:
    quick = StageTimes([(512, 0.1)] * 4, 0.1 / 512)
    slow = StageTimes([(512, 0.1)] * 4, 0.3 / 512, load_latency_s=0.05)
    alone = [
        meeting_point_bound(
            stage.chunk_seconds,
            stage.load_seconds_per_token,
            load_latency_s=stage.load_latency_s,
        ).seconds
        for stage in (quick, slow)
    ]
    assert alone[0] < alone[1]
    assert stages_bound([quick, slow, quick]) == alone[1]
    assert stages_bound([]) == 0.0


cells = st.lists(
    st.tuples(st.floats(0, 10), st.floats(0, 10) | st.just(np.inf), st.integers(0, 2)), max_size=12
)


@settings(deadline=None, max_examples=60)
@given(cells, st.floats(0, 5))
def test_the_makespan_bound_is_the_linear_programme(
    rows: list[tuple[float, float, int]], suffix_s: float
) -> None:
    compute, load, tier = (np.array([row[i] for row in rows], float) for i in range(3))
    there = np.isfinite(load)
    # Variables: T, and the computed share of every cell. Each lane has to be done by T.
    limits = [[-1.0, *compute]]
    due = [-suffix_s]
    for each in range(3):
        loaded = np.where(there & (tier == each), load, 0.0)
        limits.append([-1.0, *-loaded])
        due.append(-loaded.sum())
    shares = [(0.0 if ok else 1.0, 1.0) for ok in there]
    best = linprog([1.0] + [0.0] * len(rows), limits, due, bounds=[(0, None), *shares])
    assert batch_makespan_bound(compute, load, tier, suffix_s) == pytest.approx(
        best.fun, abs=1e-6, rel=1e-6
    )


def test_the_makespan_bound_by_hand() -> None:
    # Compute leaves the dear cells to the link: 1 + 1 computed, 2 loaded.
    assert batch_makespan_bound([1, 1, 5, 5], [1, 1, 1, 1], [0] * 4) == pytest.approx(2.0)
    # What no tier has is computed.
    assert batch_makespan_bound([3, 1], [np.inf, 1], [0, 0]) == pytest.approx(3.0)
    assert batch_makespan_bound([], [], [], 2.0) == pytest.approx(2.0)


def test_a_second_link_halves_what_loads_take() -> None:
    one = batch_makespan_bound([100] * 8, [1] * 8, [0] * 8)
    two = batch_makespan_bound([100] * 8, [1] * 8, [0, 1] * 4)
    assert two == pytest.approx(one / 2, rel=0.02)


def test_the_mean_bound_by_hand() -> None:
    # Computed or loaded in any shares: 1 s alone, and each further one 1 s later.
    even = (np.linspace(0, 2, 101), np.linspace(2, 0, 101), 0.0)
    assert batch_mean_bound([even] * 3) == pytest.approx((1 + 2 + 3) / 3)
    # Alone it takes max(1, 1) + 4; compute does 1 + 4, too.
    assert batch_mean_bound([([0, 1, 2], [2, 1, 0], 4.0)]) == pytest.approx(5.0)
    # Suffixes can't overlap: whatever is loaded, compute needs 3 s for each.
    assert batch_mean_bound([([0, 1], [0, 0], 3.0)] * 2) == pytest.approx((3 + 6) / 2)


def test_the_mean_bound_is_no_less_than_the_lone_times() -> None:
    # The prices alone would say 1.5: half of either lane. No split is that good.
    assert batch_mean_bound([([0.0, 3.0], [3.0, 0.0], 0.0)]) == pytest.approx(3.0)


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="one compute, load and tier each"):
        batch_makespan_bound([1, 2], [1], [0, 0])
    with pytest.raises(ValueError, match="negative"):
        batch_makespan_bound([-1], [1], [0])
    with pytest.raises(ValueError, match="negative"):
        batch_makespan_bound([1], [1], [0], -1.0)
    with pytest.raises(ValueError, match="at least one request"):
        batch_mean_bound([])
