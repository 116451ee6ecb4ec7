"""The least time a restore can take: what every measured time is divided by.

CacheFlow (arXiv 2604.25080) recomputes from the front and loads from the tail at once; whoever does
this with given lanes can't be faster than the best single meeting point of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[np.float64]


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


@dataclass(frozen=True)
class StageTimes:
    """What one pipeline stage measured of one prefix; see `meeting_point_bound`."""

    chunk_seconds: Sequence[tuple[int, float]]
    load_seconds_per_token: float
    load_latency_s: float = 0.0


def stages_bound(stages: Sequence[StageTimes]) -> float:
    """Least seconds until every pipeline stage has the prefix back.

    With boundary activations stages restore at once and independently (arXiv 2604.25080), each from
    both ends of its own: the slowest meeting counts. 0 without stages.

    Raises:
        ValueError: as `meeting_point_bound` does.
    """
    meetings = (
        meeting_point_bound(
            stage.chunk_seconds, stage.load_seconds_per_token, load_latency_s=stage.load_latency_s
        )
        for stage in stages
    )
    return max((meeting.seconds for meeting in meetings), default=0.0)


def batch_makespan_bound(
    compute_s: npt.ArrayLike,
    load_s: npt.ArrayLike,
    tier: npt.ArrayLike,
    suffix_s: float = 0.0,
) -> float:
    """Least seconds until a whole batch has its first tokens: a linear programme, solved exactly.

    Every cell is computed or loaded or a part of it each, in any order: least T so that the compute
    lane and every link are done by T. For a given T each link leaves what it can't load by then to
    the compute lane, those cells first that cost it least per second of link.

    Args:
        compute_s: (cells,) seconds to compute each cell of any request.
        load_s: (cells,) seconds to load it; infinite where no tier has it.
        tier: (cells,) link that loads it.
        suffix_s: seconds of the compute lane for all suffixes.

    Raises:
        ValueError: the arrays differ in length, or a time is negative.
    """
    compute, load, link = (np.asarray(each, float) for each in (compute_s, load_s, tier))
    if not compute.shape == load.shape == link.shape or compute.ndim != 1:
        raise ValueError(
            f"cells need one compute, load and tier each: {compute.shape}, {load.shape}, "
            f"{link.shape}"
        )
    if suffix_s < 0 or (compute < 0).any() or (load < 0).any():
        raise ValueError("times must not be negative")
    there = np.isfinite(load) & (load > 0)
    must = suffix_s + float(compute[np.isinf(load)].sum())
    relief = [_cheapest_first(compute[on], load[on]) for on in _by_link(there, link)]

    def compute_by(seconds: float) -> float:
        left = (np.interp(taken[-1] - seconds, taken, spent) for taken, spent in relief)
        return must + float(sum(left))

    early, late = 0.0, compute_by(0.0)
    for _ in range(_HALVINGS):
        middle = (early + late) / 2
        early, late = (early, middle) if compute_by(middle) <= middle else (middle, late)
    return early


_HALVINGS = 60


def _by_link(there: npt.NDArray[np.bool_], link: _Array) -> list[npt.NDArray[np.bool_]]:
    return [there & (link == each) for each in np.unique(link[there])]


def _cheapest_first(compute: _Array, load: _Array) -> tuple[_Array, _Array]:
    """Link seconds taken over and compute seconds spent on them, summed, cheapest cells first."""
    with np.errstate(over="ignore"):
        order = np.argsort(compute / load)
    return (
        np.concatenate([[0.0], np.cumsum(load[order])]),
        np.concatenate([[0.0], np.cumsum(compute[order])]),
    )


_PRICES = np.linspace(0.0, 1.0, 41)


def priced(compute_s: _Array, load_s: _Array, suffix_s: float, prices: _Array) -> _Array:
    """Least cost of one request over all its splits, at each price of the compute lane.

    Args:
        compute_s: (splits,) seconds of the compute lane.
        load_s: (splits,) seconds of the link.
        suffix_s: seconds of the compute lane for the suffix.
        prices: (prices,) from 0 to 1, of a second of the compute lane; one of link costs the rest.
    """
    cost = np.outer(prices, compute_s + suffix_s) + np.outer(1 - prices, load_s)
    return np.asarray(cost.min(axis=1))


def batch_mean_bound(options: Sequence[tuple[npt.ArrayLike, npt.ArrayLike, float]]) -> float:
    """Lower bound on the mean time to first token of requests that are all there at time 0.

    Until the k-th first token both lanes have done all that k of the requests need. So at any
    prices that sum to 1 it can't come before the sum of the k least costs; and no request is done
    before it would be alone. The greater of the two, mean over k.

    Args:
        options: for each request the (options,) compute and load seconds of each way to split its
            prefix, and the seconds of its suffix, which is computed when the prefix is back.

    Raises:
        ValueError: no requests.
    """
    if not options:
        raise ValueError("a bound on a mean needs at least one request")
    known = [(np.asarray(c, float), np.asarray(io, float), s) for c, io, s in options]
    costs = np.sort([priced(*each, _PRICES) for each in known], axis=0).cumsum(axis=0)
    # The k-th to be done is at least as late as k of the requests would be alone.
    alone = np.sort([np.maximum(c, io).min() + s for c, io, s in known])
    return float(np.maximum(costs.max(axis=1), alone).mean())
