"""What a simulation found out: TTFT and how busy a lane was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.simulator.result import Lane, Piece, Result, Served


def lane_of(edges: list[int], gaps: list[bool]) -> Lane:
    """A lane busy between each two edges where there is no gap."""
    pieces = [
        Piece(0, "load", start, stop, Span(0, 1), 1)
        for start, stop, gap in zip(edges, edges[1:], gaps, strict=False)
        if not gap
    ]
    return Lane(pieces=pieces)


edge_lists = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True).map(sorted)


@settings(deadline=None)
@given(edge_lists, st.lists(st.booleans(), min_size=12, max_size=12), st.data())
def test_busy_share_counts_the_busy_seconds_of_the_window(
    edges: list[int], gaps: list[bool], data: st.DataObject
) -> None:
    lane = lane_of(edges, gaps)
    start = data.draw(st.integers(-5, 44))
    stop = data.draw(st.integers(start + 1, 45))
    busy = sum(
        any(piece.start_s <= second < piece.stop_s for piece in lane.pieces)
        for second in range(start, stop)
    )
    assert lane.busy_share(start, stop) == pytest.approx(busy / (stop - start))


def test_busy_share_of_a_lane_that_did_nothing() -> None:
    assert Lane().busy_share(0.0, 1.0) == 0.0


def test_lanes_do_not_share_their_pieces() -> None:
    lane = Lane()
    lane.pieces.append(Piece(0, "load", 0.0, 1.0, Span(0, 1), 1))
    assert Lane().pieces == []


def served(rid: int, arrived_s: float, first_token_s: float) -> Served:
    return Served(rid, arrived_s, 100, 1, first_token_s=first_token_s, done_s=first_token_s + 50)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)).map(lambda pair: (pair[0], sum(pair))),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 100),
)
def test_ttft_counts_from_the_arrival_in_order_of_ids(
    times: list[tuple[float, float]], percent: int
) -> None:
    result = Result([served(rid, *pair) for rid, pair in enumerate(times)], {}, 1e4)
    expected = [first - arrived for arrived, first in times]
    assert result.ttft_s.tolist() == expected
    assert result.mean_ttft_s == pytest.approx(sum(expected) / len(expected))
    assert result.percentile_s(percent) == pytest.approx(np.percentile(expected, percent))


def test_percentiles_are_percents() -> None:
    result = Result([served(i, 1.0, 1.0 + i) for i in range(101)], {}, 200.0)
    assert (result.percentile_s(50), result.percentile_s(99)) == (50.0, 99.0)
    assert result.mean_ttft_s == 50.0
