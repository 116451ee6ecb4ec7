"""Pages and segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow_sgl.core.geometry import Segment, Span, page_ceil, page_floor, segments_of

PAGE = 64


def cut(pages: str, first_page: int = 0) -> list[tuple[int, int, int]]:
    """Segments, in pages, of a span drawn as x (present) and - (missing)."""
    span = Span(first_page * PAGE, (first_page + len(pages)) * PAGE)
    segments = segments_of(span, [page == "x" for page in pages], PAGE)
    return [(s.start // PAGE, s.loadable_from // PAGE, s.stop // PAGE) for s in segments]


@pytest.mark.parametrize(
    ("pages", "segments"),
    [
        ("", []),
        ("xxxx", [(0, 0, 4)]),
        ("--xx", [(0, 2, 4)]),
        ("xx--", [(0, 0, 2)]),  # the missing end is plain compute
        ("----", []),
        ("x-xx", [(0, 0, 1), (1, 2, 4)]),
        ("-x--xxx-", [(0, 1, 2), (2, 4, 7)]),
    ],
)
def test_a_run_of_present_pages_closes_a_segment(
    pages: str, segments: list[tuple[int, int, int]]
) -> None:
    assert cut(pages) == segments


def test_segments_are_positions_in_the_request() -> None:
    assert cut("-x", first_page=5) == [(5, 6, 7)]


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 9), st.sampled_from([1, 16, 64]))
def test_segments_load_what_is_there_and_nothing_else(
    present: list[bool], first_page: int, page: int
) -> None:
    start = first_page * page
    span = Span(start, start + len(present) * page)
    segments = segments_of(span, present, page)
    loadable = [t for s in segments for t in range(s.loadable_from, s.stop, page)]
    assert loadable == [start + i * page for i, there in enumerate(present) if there]
    stops = [start, *(s.stop for s in segments)]
    assert [s.start for s in segments] == stops[:-1]  # nothing between them is left out


@pytest.mark.parametrize(
    ("span", "pages"), [(Span(1, 65), 1), (Span(0, 65), 1), (Span(0, 64), 2), (Span(0, 64), 0)]
)
def test_presence_must_cover_the_span(span: Span, pages: int) -> None:
    with pytest.raises(ValueError, match="do not cover"):
        segments_of(span, [True] * pages, PAGE)


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_floor_and_ceil_enclose_tokens(tokens: int, page: int) -> None:
    low, high = page_floor(tokens, page), page_ceil(tokens, page)
    assert low % page == high % page == 0
    assert low <= tokens <= high
    assert high - low == (page if tokens % page else 0)


def test_spans_know_their_size_and_order() -> None:
    assert Span(64, 192).tokens == 128
    assert Span(5, 5).tokens == 0
    assert sorted([Span(64, 128), Span(0, 64)]) == [Span(0, 64), Span(64, 128)]


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (6, 5)])
def test_no_span_runs_backwards(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not a span"):
        Span(start, stop)


@pytest.mark.parametrize("ends", [(-1, 0, 1), (2, 1, 3), (0, 4, 3), (3, 3, 3)])
def test_a_segment_is_a_hole_and_what_can_be_loaded(ends: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="not a segment"):
        Segment(*ends)
