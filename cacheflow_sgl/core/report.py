"""What one restore did: when its two lanes were busy, and how it ended."""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cacheflow_sgl.core.geometry import Span


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds [start_s, stop_s) of a monotonic clock that both lanes share.

    Raises ValueError where it would end before it starts.
    """

    start_s: float
    stop_s: float

    def __post_init__(self) -> None:
        if not self.start_s <= self.stop_s:
            raise ValueError(f"an interval cannot end at {self.stop_s} and start at {self.start_s}")

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.stop_s - self.start_s


@dataclass
class LaneLog:
    """What one lane did for one restore: when it was busy, and with which tokens.

    One thread adds. Another may read meanwhile, and sees the work added so far.
    """

    busy: list[tuple[Interval, Span]] = field(default_factory=list)

    def add(self, interval: Interval, span: Span) -> None:
        """Note that the lane worked on `span` during `interval`; any order."""
        self.busy.append((interval, span))

    @property
    def busy_s(self) -> float:
        """Seconds in which the lane was busy; a moment in two intervals counts once."""
        return sum((interval.seconds for interval in self.united()), 0.0)

    @property
    def tokens(self) -> int:
        """Tokens worked on, added up over the spans."""
        return sum(span.tokens for _, span in self.busy)

    def united(self) -> Iterator[Interval]:
        """The busy times in ascending order, those that touch or overlap made one."""
        return _united(interval for interval, _ in self.busy)


def _united(intervals: Iterable[Interval]) -> Iterator[Interval]:
    current: Interval | None = None
    for interval in sorted(intervals, key=lambda each: each.start_s):
        if current is None:
            current = interval
        elif interval.start_s <= current.stop_s:
            current = Interval(current.start_s, max(current.stop_s, interval.stop_s))
        else:
            yield current
            current = interval
    if current is not None:
        yield current


def overlap_s(a: LaneLog, b: LaneLog) -> float:
    """Seconds in which both lanes were busy."""
    total = 0.0
    ours, theirs = a.united(), b.united()
    mine, other = next(ours, None), next(theirs, None)
    while mine is not None and other is not None:
        shared = min(mine.stop_s, other.stop_s) - max(mine.start_s, other.start_s)
        total += max(0.0, shared)
        if mine.stop_s <= other.stop_s:
            mine = next(ours, None)
        else:
            other = next(theirs, None)
    return total


class Outcome(enum.StrEnum):
    """How a restore ended."""

    RESTORED = "restored"
    """The prefix is complete on the device, some of it loaded."""
    RECOMPUTED = "recomputed"
    """All of the prefix is computed, or left to the engine's own chunks to compute."""
    ABORTED = "aborted"
    """The request ended before its prefix was complete."""
    RETRACTED = "retracted"
    """Given up: memory was taken back, or a waiting request's loads failed; it starts again."""


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """One restore, from the decision to its end. Tokens are counted from the request's start."""

    rid: str
    policy: str
    """The policy that decided: cacheflow, recompute, load, cake, ..."""
    way: str
    """What was chosen at the start: recompute, load or split."""
    reason: str
    """Why, in words."""
    outcome: str
    """How it ended, a word of `Outcome`."""
    start: int
    """First token restored; all before it were on the device already."""
    stop: int
    """End of the prefix."""
    meetings: list[int]
    """First loaded token of each segment."""
    computed_tokens: int
    loaded_tokens: int
    failed_tokens: int
    """Tokens of loads that failed; they count as computed where compute made them."""
    loaded_bytes: int
    compute_s: float
    """Seconds in which the compute lane was busy."""
    io_s: float
    """Seconds in which the I/O lane was busy."""
    overlap_s: float
    """Seconds in which both were."""
    wait_s: float
    """Seconds in which compute had nothing left to claim and waited for the last load."""
    restore_s: float
    """Seconds from the decision to the prefix being complete on the device, or to its end."""
    late: bool
    """The first load was late and the watchdog started to compute."""
    failed_loads: int
    expected_s: dict[str, float]
    """Predicted seconds by way; empty without an estimate."""

    @property
    def complete(self) -> bool:
        """Whether the whole prefix got to the device."""
        return self.outcome in (Outcome.RESTORED, Outcome.RECOMPUTED)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, seconds rounded to microseconds."""
        plain = {name: _rounded(value) for name, value in msgspec.to_builtins(self).items()}
        plain["expected_s"] = {way: _rounded(s) for way, s in plain["expected_s"].items()}
        return plain


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
