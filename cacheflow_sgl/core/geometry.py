"""Where tokens, pages and segments lie. All positions are tokens, counted from the request's start.

A restore is in general a list of segments, done front to back: what no tier has (a hole) can only
be computed, and what lies behind it can be loaded meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Tokens [start, stop) of a request. `ValueError` unless 0 <= start <= stop."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a span: [{self.start}, {self.stop})")

    @property
    def tokens(self) -> int:
        """How many tokens it has; may be 0."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, stop) of a restore with a pointer pair and a jump of their own.

    [start, loadable_from) is a hole: no tier has it, only compute can make it. What follows, up to
    `stop`, can be loaded. Either part may be empty. `ValueError` unless
    0 <= start <= loadable_from <= stop and start < stop.
    """

    start: int
    loadable_from: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.loadable_from <= self.stop or self.start == self.stop:
            raise ValueError(f"not a segment: {self.start}, {self.loadable_from}, {self.stop}")


def page_floor(tokens: int, page: int) -> int:
    """The largest multiple of `page` that is not above `tokens`."""
    return tokens // page * page


def page_ceil(tokens: int, page: int) -> int:
    """The smallest multiple of `page` that is not below `tokens`."""
    return -(-tokens // page) * page


def segments_of(span: Span, present: Sequence[bool], page: int) -> tuple[Segment, ...]:
    """Cut a span into segments by what the tiers have: `present[i]` says so of its page i.

    Each run of present pages closes one segment, together with the hole before it. Missing pages
    behind the last present one belong to no segment: they are plain compute after the restore.
    `ValueError` unless the span starts at a page and `present` covers it exactly.
    """
    if span.start % page or span.tokens != len(present) * page:
        raise ValueError(f"{len(present)} pages of {page} tokens do not cover {span}")
    segments = []
    start = at = span.start
    for there, run in groupby(map(bool, present)):
        stop = at + page * sum(1 for _ in run)
        if there:
            segments.append(Segment(start, at, stop))
            start = stop
        at = stop
    return tuple(segments)
