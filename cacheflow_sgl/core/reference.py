"""The best a small batch can do, and what a batch policy makes of the same requests.

Each request is a `Curve`: how many of its cells are computed, and what either lane needs then. All
requests are there at once; there is one compute lane and one link.

The optimum. A set of orders served by several lanes at once has a best schedule in which every lane
serves them in the same order (Ahmadi, Bagchi and Roemer, Naval Research Logistics 52, 2005): take
any schedule, sort each lane by the times at which the orders are complete, and none ends later.
Suffixes run one at a time and uninterrupted, so the order of first tokens is also the order in
which prefixes are needed, and that argument holds here. In an order 1, 2, ... with splits (c, l)
and suffixes s, and a compute lane that turns to later prefixes while an earlier one waits for its
loads, the first token of k comes at

    max(W_k, F_k),  W_k = sum of c_i + s_i,  F_k = max(F_{k-1}, G_k) + s_k,  G_k = sum of l_i

with i <= k (where k loads nothing, G_k is G_{k-1} and not above F_{k-1}). `optimum` is a dynamic
programme over subsets (Held and Karp 1962) with the states (W, F, G, sum of first tokens) that no
other state of the subset dominates, less those whose bound shows that they can't win.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cacheflow_sgl.core.batch import Batch, BatchPolicyName, Candidate, batch
from cacheflow_sgl.core.bounds import priced

_Array = npt.NDArray[np.float64]
_PRICES = np.linspace(0.0, 1.0, 9)


@dataclass(frozen=True, eq=False)
class Curve:
    """What one request costs, by how many of its cells are computed, front to back.

    `ValueError` unless both arrays have the same length, at least 2, compute rises from 0 and load
    falls to 0.
    """

    compute_s: _Array
    """(cells + 1,) seconds of the compute lane for the first 0, 1, ... cells."""
    load_s: _Array
    """(cells + 1,) seconds of the link for the others."""
    suffix_s: float
    """Seconds of the compute lane once the prefix is back."""

    def __post_init__(self) -> None:
        compute, load = self.compute_s, self.load_s
        if compute.ndim != 1 or compute.shape != load.shape or len(compute) < 2:
            raise ValueError(
                f"a curve needs two arrays of one length, at least 2: {compute.shape}, {load.shape}"
            )
        if compute[0] != 0 or load[-1] != 0 or self.suffix_s < 0:
            raise ValueError("a curve computes nothing at first and loads nothing at last")
        if (np.diff(compute) < 0).any() or (np.diff(load) > 0).any():
            raise ValueError("compute must rise and load fall along a curve")

    @property
    def cells(self) -> int:
        """How many cells the prefix has."""
        return len(self.compute_s) - 1

    @cached_property
    def priced(self) -> _Array:
        """(prices,) least cost over all splits at each of `_PRICES`."""
        return priced(self.compute_s, self.load_s, self.suffix_s, _PRICES)


@dataclass(frozen=True)
class Optimum:
    """The best schedule of a batch."""

    mean_s: float
    """Mean time to first token."""
    bound_s: float
    """No schedule has a lower mean; equal to `mean_s` where the search was exhaustive."""
    order: tuple[int, ...]
    """Requests in the order in which both lanes serve them."""
    splits: tuple[int, ...]
    """Cells computed of each request, by its place in the batch."""


@dataclass(eq=False)
class _States:
    """Partial schedules of one subset, a row each."""

    work: _Array
    """(rows,) seconds of the compute lane for all that was served, its idle time left out."""
    first: _Array
    """(rows,) time of the last first token."""
    link: _Array
    """(rows,) time at which the link is free."""
    total: _Array
    """(rows,) sum of all first tokens so far."""
    path: npt.NDArray[np.int32]
    """(rows, served, 2) request and computed cells, in the order in which they are served."""

    def __getitem__(self, rows: npt.NDArray) -> _States:
        return _States(
            self.work[rows], self.first[rows], self.link[rows], self.total[rows], self.path[rows]
        )

    @staticmethod
    def joined(parts: Sequence[_States]) -> _States:
        """All rows of all parts."""
        return _States(
            np.concatenate([part.work for part in parts]),
            np.concatenate([part.first for part in parts]),
            np.concatenate([part.link for part in parts]),
            np.concatenate([part.total for part in parts]),
            np.concatenate([part.path for part in parts]),
        )

    def followed_by(self, request: int, curve: Curve) -> _States:
        """Every state continued with every split of the request."""
        splits = np.arange(curve.cells + 1)
        work = self.work[:, None] + curve.compute_s + curve.suffix_s
        link = self.link[:, None] + curve.load_s
        first = np.maximum(work, np.maximum(self.first[:, None], link) + curve.suffix_s)
        step = np.empty((len(self.work), len(splits), 1, 2), np.int32)
        step[..., 0] = request
        step[:, :, 0, 1] = splits
        before = np.repeat(self.path, len(splits), axis=0)
        return _States(
            work.ravel(),
            first.ravel(),
            link.ravel(),
            (self.total[:, None] + first).ravel(),
            np.concatenate([before, step.reshape(-1, 1, 2)], axis=1),
        )

    def undominated(self) -> _States:
        """Without those that another state is no worse than.

        In a sweep by total two facts are left to compare: a state that has served its last request
        (`first`) before another is through with its work, with its link free no later, is no worse
        in anything to come.
        """
        order = np.argsort(self.total, kind="stable")
        first, work, link = self.first[order], self.work[order], self.link[order]
        keep = np.zeros(len(order), bool)
        # The kept states as a staircase: ascending `first`, the least `link` up to each.
        stair_first, stair_link = np.array([-np.inf]), np.array([np.inf])
        for start in range(0, len(order), _BLOCK):
            rows = np.arange(start, min(start + _BLOCK, len(order)))
            step = np.searchsorted(stair_first, work[rows], side="right") - 1
            rows = rows[stair_link[step] > link[rows]]
            no_worse = (first[rows][:, None] <= work[rows]) & (link[rows][:, None] <= link[rows])
            rows = rows[~np.triu(no_worse, 1).any(axis=0)]
            keep[rows] = True
            stair_first = np.concatenate([stair_first, first[rows]])
            stair_link = np.concatenate([stair_link, link[rows]])
            by_first = np.lexsort([stair_link, stair_first])
            stair_first = stair_first[by_first]
            stair_link = np.minimum.accumulate(stair_link[by_first])
            lower = np.concatenate([[True], np.diff(stair_link) < 0])
            stair_first, stair_link = stair_first[lower], stair_link[lower]
        return self[order[keep]]


def optimum(curves: Sequence[Curve], *, beam: int = 2000) -> Optimum:
    """The least mean time to first token of a batch that is there at time 0, by its best schedule.

    Made for up to 6 requests of some tens of cells: a few seconds at most.

    Args:
        curves: one for each request.
        beam: states of a subset that are continued, those of the least bound. Mostly there are not
            so many and the result is exact; if not, `bound_s` says how far from it at most.

    Raises:
        ValueError: no requests.
    """
    if not curves:
        raise ValueError("an optimum needs at least one request")
    rough, _ = _search(curves, np.inf, min(beam, _ROUGH_BEAM))
    assert rough is not None
    # What is found first makes the second search short: whatever can't beat it is left out.
    best, left_out = _search(curves, _total(rough), beam)
    best = best or rough
    least = min(left_out, _total(best))
    return Optimum(
        _total(best) / len(curves),
        least / len(curves),
        tuple(best.path[0, :, 0].tolist()),
        tuple(best.path[0, np.argsort(best.path[0, :, 0]), 1].tolist()),
    )


def _total(ends: _States) -> float:
    return float(ends.total[0])


_ROUGH_BEAM = 16
_BLOCK = 256


def _search(curves: Sequence[Curve], limit: float, beam: int) -> tuple[_States | None, float]:
    """The schedules whose sum of first tokens is below the limit, least first, None if none is.

    And the least bound of what was left out because the beam was full; infinite if it never was.
    """
    zero = np.zeros(1)
    states = {0: _States(zero, zero, zero, zero, np.empty((1, 0, 2), np.int32))}
    least_left_out = np.inf
    for _ in curves:
        parts: dict[int, list[_States]] = {}
        for subset, before in states.items():
            for request, curve in enumerate(curves):
                if not subset >> request & 1:
                    after = before.followed_by(request, curve)
                    parts.setdefault(subset | 1 << request, []).append(after)
        states = {}
        for subset, found in parts.items():
            joined = _States.joined(found)
            bound = joined.total + _rest_bound(curves, subset, joined)
            chosen = np.flatnonzero(bound < limit)
            if len(chosen) > beam:
                chosen = chosen[np.argsort(bound[chosen], kind="stable")]
                least_left_out = min(least_left_out, float(bound[chosen[beam]]))
                chosen = chosen[:beam]
            if len(chosen):
                states[subset] = joined[chosen].undominated()
    return states.get((1 << len(curves)) - 1), least_left_out


def _rest_bound(curves: Sequence[Curve], subset: int, states: _States) -> _Array:
    """(rows,) lower bound on the sum of the first tokens that are still to come."""
    rest = [curve for request, curve in enumerate(curves) if not subset >> request & 1]
    if not rest:
        return np.zeros(len(states.work))
    least = np.sort([curve.priced for curve in rest], axis=0).cumsum(axis=0)
    ready = np.outer(states.work, _PRICES) + np.outer(states.link, 1 - _PRICES)
    suffixes = np.cumsum(sorted(curve.suffix_s for curve in rest))
    total = np.zeros(len(states.work))
    for done, suffix_s in zip(least, suffixes, strict=True):
        total += np.maximum((ready + done).max(axis=1), states.first + suffix_s)
    return total


class _Run:
    """One request on its way through the executor."""

    def __init__(self, order: int, curve: Curve, arrived_s: float) -> None:
        self.curve = curve
        self.low, self.high = 0, curve.cells
        self.computing_until = self.loading_until = math.inf
        """When either lane is through with its last claim here; infinite where it is elsewhere."""
        self.suffix_begun = False
        self.candidate = Candidate(
            str(order), order, arrived_s, 0.0, 0.0, curve.suffix_s, can_compute=True, tiers=(0,)
        )

    def compute(self, now: float) -> float:
        """Begin its next cell or its suffix; when that is done."""
        self.computing_until = now + self._step_s
        self.suffix_begun = self.low == self.high
        self.low = min(self.low + 1, self.high)
        return self.computing_until

    def load(self, now: float) -> float:
        """Begin to load its last cell; when that is done."""
        self.loading_until = now + self._load_s(self.high - 1)
        self.high -= 1
        return self.loading_until

    def seen(self, now: float) -> Candidate:
        """What a policy sees of it: a lane takes no cell that the other would be done with first.

        Claims of the engine become smaller near the meeting to the same end.
        """
        low, high, seen = self.low, self.high, self.candidate
        left = low < high
        seen.compute_s = float(self.curve.compute_s[high] - self.curve.compute_s[low])
        seen.load_s = self._load_s(low)
        seen.step_s = self._step_s
        seen.step_load_s = self._load_s(low) - self._load_s(low + 1) if left else 0.0
        loads_done = max(self.loading_until, now) + seen.load_s
        if left:
            landed_s = now + self._load_s(high - 1)
            in_time = landed_s <= max(self.computing_until, now) + seen.compute_s
            seen.tiers = (0,) if in_time else ()
            seen.can_compute = now + seen.step_s <= loads_done
        else:
            seen.tiers = ()
            landed = self.loading_until <= now or self.loading_until == math.inf
            seen.can_compute = landed and not self.suffix_begun
        seen.ready_s = math.inf if seen.can_compute or self.suffix_begun else loads_done
        return seen

    @property
    def _step_s(self) -> float:
        if self.low == self.high:
            return self.curve.suffix_s
        return float(self.curve.compute_s[self.low + 1] - self.curve.compute_s[self.low])

    def _load_s(self, start: int) -> float:
        """Seconds to load all unclaimed cells from `start` on."""
        return float(self.curve.load_s[start] - self.curve.load_s[self.high])


def executed(
    curves: Sequence[Curve],
    policy: BatchPolicyName | Batch,
    arrived_s: Sequence[float] | None = None,
) -> list[float]:
    """Seconds from its arrival to the first token of each request under a policy, cell by cell.

    Args:
        curves: one for each request, in order of arrival.
        policy: who gets the lanes; a `Batch` must be empty.
        arrived_s: when each arrives, ascending; all at 0 by default.

    Raises:
        RuntimeError: the policy names nobody though requests wait and both lanes are idle.
    """
    waiting = policy if isinstance(policy, Batch) else batch(policy)
    arrivals = [0.0] * len(curves) if arrived_s is None else arrived_s
    runs = [_Run(*each) for each in zip(range(len(curves)), curves, arrivals, strict=True)]
    first_tokens = [math.inf] * len(runs)
    coming = deque(runs)
    computing: _Run | None = None
    loading: _Run | None = None
    compute_free_s = link_free_s = now = 0.0
    while coming or len(waiting):
        while coming and coming[0].candidate.arrived_s <= now:
            waiting.add(coming.popleft().seen(now))
        if computing and computing.suffix_begun and compute_free_s <= now:
            first_tokens[computing.candidate.order] = (
                computing.computing_until - computing.candidate.arrived_s
            )
            waiting.remove(computing.candidate.rid)
            loading = None if loading is computing else loading
            computing = None
        _update(waiting, now, computing, loading)
        to_load = waiting.next_load(0) if link_free_s <= now else None
        if to_load is not None:
            last, loading = loading, runs[to_load.order]
            if last is not None:
                last.loading_until = math.inf
            link_free_s = loading.load(now)
            _update(waiting, now, last, loading)
        to_compute = waiting.next_compute(now) if compute_free_s <= now else None
        if to_compute is not None:
            last, computing = computing, runs[to_compute.order]
            if last is not None:
                last.computing_until = math.inf
            compute_free_s = computing.compute(now)
            _update(waiting, now, last, computing)
        arrival_s = coming[0].candidate.arrived_s if coming else math.inf
        later = (each for each in (compute_free_s, link_free_s, arrival_s) if each > now)
        then = min(later, default=None)
        if then is None and len(waiting) and to_load is None and to_compute is None:
            raise RuntimeError(f"the policy leaves {len(waiting)} requests with both lanes idle")
        now = now if then is None else then
    return first_tokens


def _update(waiting: Batch, now: float, *runs: _Run | None) -> None:
    for run in runs:
        if run is not None:
            waiting.update(run.seen(now))
