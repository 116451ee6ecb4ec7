"""The least time a restore can take: what every measured time is divided by.

CacheFlow (arXiv 2604.25080) recomputes from the front and loads from the tail at once; whoever does
this with given lanes can't be faster than the best single meeting point of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class MeetingPoint:
    """Where the two pointers meet at best, and when."""

    token: int
    """First loaded token, counted from the start of the prefix; the nearest whole one."""
    seconds: float
    """Time at which both lanes are done."""


def meeting_point_bound(
    chunk_seconds: Sequence[tuple[int, float]],
    load_seconds_per_token: float,
    *,
    load_latency_s: float = 0.0,
) -> MeetingPoint:
    """Exact least max(C(m), L(N - m)) over all meeting points m.

    C is piecewise linear through the measured chunks, so a part of a chunk is taken to cost its
    part of the time, which no real forward beats. L(n) is the latency and n tokens at the link's
    rate, and nothing where nothing is loaded.

    Args:
        chunk_seconds: (rows, seconds) of each chunk of a recompute-only run, front to back.
        load_seconds_per_token: seconds per token at the rate the link really reached.
        load_latency_s: seconds before the first loaded token.

    Raises:
        ValueError: a chunk without rows, or a negative time.
    """
    if any(rows < 1 or seconds < 0 for rows, seconds in chunk_seconds):
        raise ValueError("every chunk needs at least one row and a time that is not negative")
    if load_seconds_per_token < 0 or load_latency_s < 0:
        raise ValueError("load times must not be negative")
    total = sum(rows for rows, _ in chunk_seconds)
    starts = accumulate((rows for rows, _ in chunk_seconds), initial=0)
    done = 0.0
    for start, (rows, seconds) in zip(starts, chunk_seconds, strict=False):
        load_rest = load_latency_s + (total - start) * load_seconds_per_token
        end_gap = load_rest - rows * load_seconds_per_token - (done + seconds)
        if end_gap <= 0:
            # In this chunk compute overtakes what is left to load: the two lines cross here.
            closing = seconds + rows * load_seconds_per_token
            share = (load_rest - done) / closing if closing else 0.0
            return MeetingPoint(round(start + share * rows), done + share * seconds)
        done += seconds
    # Even a single token would take longer to load than everything takes to compute.
    return MeetingPoint(total, done)


def harmonic_bound(recompute_s: float, load_s: float) -> float:
    """Least seconds where every token costs the same: Tc * Tio / (Tc + Tio) (arXiv 2604.25080).

    Args:
        recompute_s: seconds to recompute everything.
        load_s: seconds to load everything.

    Raises:
        ValueError: a time is negative.
    """
    if recompute_s < 0 or load_s < 0:
        raise ValueError("times must not be negative")
    if recompute_s == 0 or load_s == 0:
        return 0.0
    return recompute_s / (recompute_s + load_s) * load_s
