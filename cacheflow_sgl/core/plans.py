"""Which way to restore a prefix, and how much each lane claims next.

The plan is a start rule: it predicts what recomputing, loading and both at once (split) would take.
Where the two lanes of a split meet is decided at run time, by the claims they make.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from cacheflow_sgl.core.costs import MIN_ROWS, ForwardCost, LinkCost
from cacheflow_sgl.core.geometry import Span, page_ceil, page_floor

MARGIN = 0.10
"""Share of the better single way's time that a split must be predicted to save."""

_FIRST_CLAIM = 512
"""Most tokens of a forward while a cost is unknown: by the next one both have been measured."""
LONGEST_LOAD_S = 0.1
"""Predicted seconds of one load where nothing is computed beside it."""
_LATENCIES_PER_LOAD = 4
"""A load takes at least this many latencies, so that latency never dominates the link."""
_COARSE_CHUNKS = 8
"""While compute has more chunks ahead than this, the predicted walk takes several at a time."""


class Way(enum.StrEnum):
    """How a prefix comes back."""

    RECOMPUTE = "recompute"
    LOAD = "load"
    SPLIT = "split"


@dataclass(frozen=True)
class Plan:
    """The way chosen for one span, and why."""

    way: Way
    reason: str
    """Short words for logs, metrics and tests."""
    meeting: int
    """Predicted first loaded token: the span's start for a load, its stop for a recompute."""
    expected_s: Mapping[Way, float]
    """Predicted seconds of each way; empty while a cost is unknown."""


@dataclass(frozen=True)
class Costs:
    """What plans and claims are made from."""

    compute: ForwardCost
    link: LinkCost
    bytes_per_token: int
    """Bytes of KV that the link moves for one token."""

    @property
    def known(self) -> bool:
        """Whether both lanes have been measured."""
        return self.compute.known and self.link.known

    def load_s(self, tokens: int) -> float:
        """Seconds to load `tokens` tokens in one go; nothing for none."""
        return self.link.seconds(tokens * self.bytes_per_token) if tokens else 0.0

    def chunks_s(self, start: int, chunk: int, count: int) -> float:
        """Seconds of `count` forwards of `chunk` tokens one after another from `start`."""
        # A forward's cost is linear in its offset: each costs on average what the middle one does.
        return count * self.compute.seconds(start + (count - 1) * chunk // 2, chunk)

    def recompute_s(self, span: Span, chunk: int) -> float:
        """Seconds to compute the whole span in chunks."""
        count, rest = divmod(span.tokens, chunk)
        seconds = self.chunks_s(span.start, chunk, count) if count else 0.0
        return seconds + (self.compute.seconds(span.stop - rest, rest) if rest else 0.0)


def plan(span: Span, *, chunk: int, page: int, costs: Costs) -> Plan:
    """Choose the way for `span` (page-aligned) from what both lanes are predicted to take.

    A split must save `MARGIN` of the better single way; of equal single ways loading is taken, for
    it leaves the GPU free. With a cost unknown it is a split: that measures both lanes.
    """
    if span.tokens < 2 * page:
        return Plan(Way.LOAD, "prefix shorter than 2 pages", span.start, {})
    if not costs.known:
        return Plan(Way.SPLIT, "no estimate yet", _middle(span, page), {})
    meetings, expected = _predict(span, chunk, page, costs)
    single = min((Way.LOAD, Way.RECOMPUTE), key=expected.__getitem__)
    best = expected[single]
    if expected[Way.SPLIT] <= (1 - MARGIN) * best:
        saved = round(100 * (1 - expected[Way.SPLIT] / best))
        return Plan(Way.SPLIT, f"split saves {saved}%", meetings[Way.SPLIT], expected)
    return Plan(single, f"{single} alone is as fast", meetings[single], expected)


def forced(span: Span, way: Way, *, chunk: int, page: int, costs: Costs) -> Plan:
    """The plan for a way that was asked for, with predictions where the costs are known."""
    if costs.known and span.tokens:
        meetings, expected = _predict(span, chunk, page, costs)
    else:
        meetings = {
            Way.RECOMPUTE: span.stop,
            Way.LOAD: span.start,
            Way.SPLIT: _middle(span, page),
        }
        expected = {}
    return Plan(way, "forced", meetings[way], expected)


def _middle(span: Span, page: int) -> int:
    return span.start + page_floor(span.tokens // 2, page)


def _predict(
    span: Span, chunk: int, page: int, costs: Costs
) -> tuple[dict[Way, int], dict[Way, float]]:
    walk = _Walk(span.start, span.tokens, chunk, page, costs)
    split_s = walk.run()
    meetings = {
        Way.RECOMPUTE: span.stop,
        Way.LOAD: span.start,
        Way.SPLIT: walk.position,
    }
    expected = {
        Way.RECOMPUTE: costs.recompute_s(span, chunk),
        Way.LOAD: costs.load_s(span.tokens),
        Way.SPLIT: split_s,
    }
    return meetings, expected


def compute_claim(
    *,
    position: int,
    gap: int,
    load_in_flight: int = 0,
    chunk: int,
    page: int,
    costs: Costs,
    compute_in_flight_s: float = 0.0,
) -> int:
    """Tokens that the next forward should take: a chunk, less near the meeting.

    There it takes what lets the forward end when the loads have come down to it. Loads go on while
    forwards that were launched before still run, so their time counts too. Never less than two
    pages, or a forward would cost its base for nothing.

    Args:
        position: first token that no forward has been given.
        gap: unclaimed tokens from `position` up, whole pages.
        load_in_flight: tokens of load claims that are still to land.
        chunk: most tokens of one forward.
        page: tokens of a page.
        costs: what is known of both lanes.
        compute_in_flight_s: predicted seconds until the forwards already launched are done.

    Returns:
        A multiple of `page`, at least one page and at most `gap`. 0 if `gap` holds no page; and
        also while both lanes are busy and the loads are predicted to bring the rest before the
        least forward would end: it is better to wait then, and to ask again.
    """
    most = _whole_pages(chunk, gap, page)
    least = min(max(2 * page, page_ceil(MIN_ROWS, page)), most)
    if not costs.known:
        return max(least, min(most, page_ceil(min(gap // 2, _FIRST_CLAIM), page)))

    def compute_s(tokens: int) -> float:
        return compute_in_flight_s + costs.compute.seconds(position, tokens)

    def loads_s(tokens: int) -> float:
        return costs.load_s(load_in_flight + gap - tokens)

    if compute_s(most) <= loads_s(most):
        return most
    if load_in_flight and compute_in_flight_s and loads_s(0) <= compute_s(least):
        return 0
    # Both are monotone: bisect by pages for the last claim whose forward ends before the loads do.
    early, late = 0, most
    while late - early > page:
        middle = page_floor((early + late) // 2, page)
        if compute_s(middle) <= loads_s(middle):
            early = middle
        else:
            late = middle
    return max(least, early if loads_s(early) <= compute_s(late) else late)


def load_claim(*, position: int, gap: int, chunk: int, page: int, costs: Costs) -> int:
    """Tokens that the next load should take: what the link moves in half a compute step.

    Near the meeting at most a quarter of the gap, for the last load in flight is the only one that
    is waited for; but up to half of it where latency would dominate otherwise.

    Args:
        position: first token that no forward has been given.
        gap: unclaimed tokens from `position` up, whole pages.
        chunk: most tokens of one forward.
        page: tokens of a page.
        costs: what is known of both lanes.

    Returns:
        A multiple of `page`, at least one page and at most `gap`; 0 only if `gap` holds no page.
    """
    if not costs.known:
        return _whole_pages(min(chunk, gap) // 4, gap, page)
    tokens_per_s = costs.link.bytes_per_s / costs.bytes_per_token
    half_step = costs.compute.seconds(position, chunk) / 2 * tokens_per_s
    efficient = _LATENCIES_PER_LOAD * costs.link.latency_s * tokens_per_s
    tokens = round(max(min(half_step, gap / 4), min(efficient, gap / 2)) / page) * page
    return _whole_pages(tokens, gap, page)


def lone_load_claim(*, span: Span, gap: int, chunk: int, page: int, costs: Costs) -> int:
    """Tokens that the next load should take where nothing is computed: half of the span.

    No meeting is near, so it need not be short; two, so that the watchdog sees one that is late
    before all is lost; and none longer than `LONGEST_LOAD_S`, for which an abort may have to wait.
    Whole pages, at most `gap`.
    """
    tokens = max(chunk, page_ceil(span.tokens // 2, page))
    if costs.link.known:
        tokens = min(tokens, int(LONGEST_LOAD_S * costs.link.bytes_per_s / costs.bytes_per_token))
    return _whole_pages(tokens, gap, page)


def _whole_pages(tokens: int, gap: int, page: int) -> int:
    """`tokens` in whole pages, at least one, at most the gap."""
    return min(max(page, page_floor(tokens, page)), page_floor(gap, page))


@dataclass
class _Walk:
    """A split, predicted claim by claim: both lanes claim as they will at run time."""

    position: int
    gap: int
    chunk: int
    page: int
    costs: Costs
    _compute_free_s: float = 0.0
    _link_free_s: float = 0.0
    _load_tokens: int = 0
    _load_s: float = 0.0

    def run(self) -> float:
        """Seconds until both lanes are done; `position` is then the first loaded token."""
        while self.gap:
            if self._compute_free_s <= self._link_free_s:
                self._compute()
            else:
                self._load()
        return max(self._compute_free_s, self._link_free_s)

    @property
    def _coarse(self) -> int:
        """Claims taken at once, so that a long prefix takes few more steps than a short one."""
        load_s = self.costs.load_s(self.gap)
        compute_s = self.costs.compute.seconds(self.position, self.gap)
        to_compute = int(self.gap * load_s / (load_s + compute_s))
        return max(1, to_compute // (_COARSE_CHUNKS * self.chunk))

    @property
    def _load_in_flight(self) -> int:
        """Tokens of the last load that are still to land when compute is free."""
        rest_s = self._link_free_s - self._compute_free_s
        return round(self._load_tokens * rest_s / self._load_s) if self._load_s else 0

    def _compute(self) -> None:
        count, tokens = self._coarse, self.chunk
        if count == 1:
            tokens = compute_claim(
                position=self.position,
                gap=self.gap,
                load_in_flight=self._load_in_flight,
                chunk=self.chunk,
                page=self.page,
                costs=self.costs,
            )
        self._compute_free_s += self.costs.chunks_s(self.position, tokens, count)
        self.position += count * tokens
        self.gap -= count * tokens

    def _load(self) -> None:
        tokens = load_claim(
            position=self.position, gap=self.gap, chunk=self.chunk, page=self.page, costs=self.costs
        )
        count = max(1, min(self._coarse, self.gap // (4 * tokens)))
        self._load_s = count * self.costs.load_s(tokens)
        self._load_tokens = count * tokens
        self._link_free_s += self._load_s
        self.gap -= count * tokens
