"""Bounds: no split of the prefix between the two lanes beats them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.bounds import MeetingPoint, harmonic_bound, meeting_point_bound

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
