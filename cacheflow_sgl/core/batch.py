"""Who gets the lanes when several requests restore at once.

One request computes at a time and every link loads for one at a time. A batch policy names the next
of each; how much it claims is decided elsewhere. Nobody is preempted: a request that was given the
compute lane keeps it until it is done, except while it can only wait for its loads.

A decision is a look at the top of a heap, an update a push: both stay in the microseconds however
many requests wait.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from cacheflow_sgl.core.bounds import harmonic_bound

PATIENCE = 2.0
"""How many of its own joint seconds a request waits before it goes ahead of all that come later.

More serves short ones sooner and lets long ones wait longer.
"""

_MEMORY_S = 60.0
"""Seconds after which an arrival counts a third in the rate of arrivals."""
_LEAST_SPARE = 0.01


class BatchPolicyName(enum.StrEnum):
    """What may be asked for.

    `RECOMPUTE` loads nothing. `LOAD` computes no prefix but what no tier has. `CAKE` (arXiv
    2410.03065) sees each request alone: all share a link equally. `FIFO` serves both lanes in order
    of arrival. `LONGEST` (CacheFlow v1, arXiv 2604.25080) loads for the request with the most work
    left. `CACHEFLOW` is ours.
    """

    RECOMPUTE = "recompute"
    LOAD = "load"
    CAKE = "cake"
    FIFO = "fifo"
    LONGEST = "longest"
    CACHEFLOW = "cacheflow"


@dataclass(slots=True)
class Candidate:
    """What a policy sees of one request being restored; its owner updates it after each claim."""

    rid: str
    order: int
    """Place in the order of arrival; unlike that of any other request."""
    arrived_s: float
    compute_s: float
    """Predicted seconds to compute all of its unclaimed prefix tokens."""
    load_s: float
    """Predicted seconds to load all of them that tiers have, alone on its links."""
    suffix_s: float
    """Predicted seconds of prefill once the prefix is back."""
    can_compute: bool
    """A compute claim, of prefix or suffix, is possible now."""
    tiers: tuple[int, ...]
    """Those on whose links a load claim is possible now."""
    step_s: float = 0.0
    """Predicted seconds of its next compute claim."""
    step_load_s: float = 0.0
    """Predicted seconds that its link would need for the tokens of that step; 0 for none."""
    ready_s: float = math.inf
    """When it is predicted to be able to compute again, where it only waits for its loads."""

    @property
    def joint_s(self) -> float:
        """Seconds until its first token if it had both lanes for itself: harmonic, then suffix."""
        return harmonic_bound(self.compute_s, self.load_s) + self.suffix_s


Key = tuple[float, ...]


class _Queue:
    """Requests by ascending key. A heap whose outdated entries go when they come to the top."""

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}
        self._heap: list[tuple[Key, str]] = []

    def put(self, rid: str, key: Key) -> None:
        """Add it, or move it to another key."""
        if self._keys.get(rid) != key:
            self._keys[rid] = key
            heappush(self._heap, (key, rid))
            if len(self._heap) > 2 * len(self._keys) + 64:
                self._heap = [(key, rid) for rid, key in self._keys.items()]
                heapify(self._heap)

    def drop(self, rid: str) -> None:
        """Take it out, if it is there."""
        self._keys.pop(rid, None)

    def first(self) -> str | None:
        """The one with the least key."""
        heap, keys = self._heap, self._keys
        while heap:
            key, rid = heap[0]
            if keys.get(rid) == key:
                return rid
            heappop(heap)
        return None


class Batch:
    """The requests being restored, in order of arrival on both lanes (`FIFO`); base of the others.

    Not thread-safe. Whoever is named is taken to be served; `update` says what it has left then.
    """

    def __init__(self) -> None:
        self._candidates: dict[str, Candidate] = {}
        self._begun: dict[str, int] = {}
        """How many had begun before it: those that have go first, in this order."""
        self._beginnings = count()
        self._compute = _Queue()
        self._loads: dict[int, _Queue] = {}
        self._tiers: dict[str, tuple[int, ...]] = {}
        """In which queues of `_loads` a request is."""

    def __len__(self) -> int:
        return len(self._candidates)

    def add(self, candidate: Candidate) -> None:
        """Take a request in. `ValueError` where it is there already."""
        if candidate.rid in self._candidates:
            raise ValueError(f"request {candidate.rid} is in the batch already: update it")
        self._candidates[candidate.rid] = candidate
        self._file(candidate)

    def update(self, candidate: Candidate) -> None:
        """Note what has changed. `KeyError` where the request was never added."""
        if candidate.rid not in self._candidates:
            raise KeyError(f"request {candidate.rid} is not in the batch: add it first")
        self._candidates[candidate.rid] = candidate
        self._file(candidate)

    def remove(self, rid: str) -> None:
        """Let a request go: it has its first token, or was aborted. `KeyError` if unknown."""
        del self._candidates[rid]
        self._begun.pop(rid, None)
        self._compute.drop(rid)
        self._leave_links(rid)

    def next_compute(self, now_s: float) -> Candidate | None:
        """Whose claim the compute lane should run next, at `now_s`; it has begun from now on.

        None where nobody can compute or the lane had better wait: ask again after an update.
        """
        rid = self._compute.first()
        return None if rid is None else self._begin(rid)

    def next_load(self, tier: int) -> Candidate | None:
        """Whose claim the link of `tier` should load next."""
        queue = self._loads.get(tier)
        rid = queue.first() if queue else None
        return None if rid is None else self._candidates[rid]

    def note_decode(self, now_s: float, seconds: float) -> None:
        """The compute lane has decoded for so long, up to `now_s`."""

    # -- what a policy decides

    def _may_compute(self, candidate: Candidate) -> bool:
        return candidate.can_compute

    def _may_load_from(self, candidate: Candidate) -> tuple[int, ...]:
        return candidate.tiers

    def _compute_key(self, candidate: Candidate) -> Key:
        """Least first, among those that have begun and among those that haven't."""
        return (candidate.order,)

    def _load_key(self, candidate: Candidate, tier: int) -> Key:
        """Least first, on the link of `tier`."""
        return (candidate.order,)

    # -- inside

    def _file(self, candidate: Candidate) -> None:
        rid = candidate.rid
        if self._may_compute(candidate):
            self._compute.put(rid, self._rank(candidate))
        else:
            self._compute.drop(rid)
        tiers = self._may_load_from(candidate)
        if self._tiers.get(rid) != tiers:
            self._leave_links(rid)
            self._tiers[rid] = tiers
        for tier in tiers:
            self._loads.setdefault(tier, _Queue()).put(rid, self._load_key(candidate, tier))

    def _begin(self, rid: str) -> Candidate:
        candidate = self._candidates[rid]
        if rid not in self._begun:
            self._begun[rid] = next(self._beginnings)
            self._file(candidate)
        return candidate

    def _rank(self, candidate: Candidate) -> Key:
        return (self._turn_of(candidate.rid), *self._compute_key(candidate))

    def _turn_of(self, rid: str) -> float:
        """Those that have begun first, in the order in which they did."""
        return self._begun.get(rid, math.inf)

    def _leave_links(self, rid: str) -> None:
        for tier in self._tiers.pop(rid, ()):
            self._loads[tier].drop(rid)


class _Recompute(Batch):
    """Loads nothing."""

    def _may_load_from(self, candidate: Candidate) -> tuple[int, ...]:
        return ()


class _Load(Batch):
    """Computes only when nothing is left to load: what no tier has, and suffixes.

    Those go in the order in which their prefixes are complete.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ready: dict[str, int] = {}
        self._clock = count()

    def remove(self, rid: str) -> None:
        super().remove(rid)
        self._ready.pop(rid, None)

    def _may_compute(self, candidate: Candidate) -> bool:
        return candidate.can_compute and candidate.load_s <= 0

    def _compute_key(self, candidate: Candidate) -> Key:
        if candidate.rid not in self._ready:
            self._ready[candidate.rid] = next(self._clock)
        return (self._ready[candidate.rid],)


class _Cake(Batch):
    """A link goes round: the one whose last turn on it is longest ago loads next."""

    def __init__(self) -> None:
        super().__init__()
        self._turn: dict[str, dict[int, int]] = defaultdict(dict)
        self._clock = count(1)

    def remove(self, rid: str) -> None:
        super().remove(rid)
        self._turn.pop(rid, None)

    def next_load(self, tier: int) -> Candidate | None:
        candidate = super().next_load(tier)
        if candidate is not None:
            self._turn[candidate.rid][tier] = next(self._clock)
            self._file(candidate)
        return candidate

    def _load_key(self, candidate: Candidate, tier: int) -> Key:
        return (self._turn[candidate.rid].get(tier, 0), candidate.order)


class _Longest(Batch):
    """Loads for the one with the most left to compute."""

    def _load_key(self, candidate: Candidate, tier: int) -> Key:
        return (-candidate.compute_s, candidate.order)


class _Demand:
    """Work for one lane: what waits now, and how many more will come while it is done.

    The latter is guessed from those that have come and gone. Those that wait are no sign of more: a
    batch may be all there is.
    """

    def __init__(self) -> None:
        self.waiting_s = 0.0
        self._at_s = 0.0
        self._arrivals = 0.0
        self._seconds = 0.0
        """Both as of `_at_s`, those of long ago hardly counted."""

    def came(self, arrived_s: float, seconds: float) -> None:
        """A request that came then had so much work for the lane."""
        self.takes(arrived_s, seconds)
        self._arrivals += 1

    def takes(self, now_s: float, seconds: float) -> None:
        """So much work for the lane."""
        self._decay(now_s)
        self._seconds += seconds

    def more(self, now_s: float) -> float:
        """Requests expected before the lane is idle, each of which a second of work delays by one.

        As in any queue: arrivals a second, times the work that waits, over the share of time that
        the lane has to spare.
        """
        self._decay(now_s)
        spare = max(1 - self._seconds / _MEMORY_S, _LEAST_SPARE)
        return self._arrivals / _MEMORY_S * self.waiting_s / spare

    def _decay(self, now_s: float) -> None:
        kept = math.exp(min(self._at_s - now_s, 0.0) / _MEMORY_S)
        self._arrivals *= kept
        self._seconds *= kept
        self._at_s = max(now_s, self._at_s)


class _CacheFlow(Batch):
    """Both lanes: first who is soonest done, of those who came together.

    The key is `arrived_s` + `PATIENCE` * joint seconds, as it was when the request was added. Links
    follow it strictly: spare I/O goes to whoever computes next. Giving it to the highest saving
    instead costs more than it brings, for a second of link that the next in line lacks delays all
    behind it, while cells of a high saving can still be loaded when their turn comes. Nor does
    compute turn away for long: while the first in line waits for its loads for less than the step
    that another would take, the lane waits too, for a step can't be interrupted.

    A step of a prefix is left to the link where those behind it on the compute lane would lose
    more than it saves (`_crowds_out`): a busy server loads, an idle one splits.

    `pytest -s tests/core/test_reference.py` prints its regret to `reference.optimum` beside that of
    the others, for batches that arrive together; prices of what is still to come play no part
    there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._key: dict[str, float] = {}
        self._in_line = _Queue()
        """Who can compute, or will when its loads have landed."""
        self._ready = _Queue()
        """Who can compute its suffix."""
        self._suffixes, self._loading = _Demand(), _Demand()
        self._weights: dict[str, tuple[float, float]] = {}
        """Seconds of suffix and of loads that each has in the two demands."""
        self._brought: dict[str, tuple[float, float, float]] = {}
        """When each came, and its seconds of suffix and of loads then."""
        self._to_load = 0

    def add(self, candidate: Candidate) -> None:
        self._key[candidate.rid] = candidate.arrived_s + PATIENCE * candidate.joint_s
        self._brought[candidate.rid] = candidate.arrived_s, candidate.suffix_s, candidate.load_s
        super().add(candidate)

    def remove(self, rid: str) -> None:
        super().remove(rid)
        self._in_line.drop(rid)
        self._ready.drop(rid)
        del self._key[rid]
        self._weigh(rid, 0.0, 0.0)
        del self._weights[rid]
        arrived_s, suffix_s, load_s = self._brought.pop(rid)
        self._suffixes.came(arrived_s, suffix_s)
        if load_s > 0:
            self._loading.came(arrived_s, load_s)

    def next_compute(self, now_s: float) -> Candidate | None:
        chosen, head = self._compute.first(), self._in_line.first()
        if chosen is None or head is None:
            return None
        ready = self._ready.first()
        if self._crowds_out(self._candidates[chosen], ready is not None, now_s):
            return None if ready is None else self._begin(ready)
        if head == chosen:
            return self._begin(chosen)
        # What fills a wait has not begun: the head comes first again when its loads have landed.
        filler = self._candidates[chosen]
        waits = self._candidates[head].ready_s < now_s + filler.step_s
        return None if waits else filler

    def note_decode(self, now_s: float, seconds: float) -> None:
        self._suffixes.takes(now_s, seconds)

    def _weigh(self, rid: str, suffix_s: float, load_s: float) -> None:
        """Note what a request has left of both demands."""
        old_suffix_s, old_load_s = self._weights.get(rid, (0.0, 0.0))
        self._weights[rid] = suffix_s, load_s
        self._suffixes.waiting_s += suffix_s - old_suffix_s
        self._loading.waiting_s += load_s - old_load_s
        self._to_load += (load_s > 0) - (old_load_s > 0)

    def _file(self, candidate: Candidate) -> None:
        super()._file(candidate)
        self._weigh(candidate.rid, candidate.suffix_s, candidate.load_s)
        if candidate.can_compute or candidate.ready_s < math.inf:
            self._in_line.put(candidate.rid, self._rank(candidate))
        else:
            self._in_line.drop(candidate.rid)
        if candidate.can_compute and candidate.compute_s <= 0:
            self._ready.put(candidate.rid, self._rank(candidate))
        else:
            self._ready.drop(candidate.rid)

    def _crowds_out(self, candidate: Candidate, others_ready: bool, now_s: float) -> bool:
        """Whether computing the next step of a prefix costs others more than it saves.

        The step delays all who come behind it on the compute lane, and spares its link as many
        seconds as it would need for the same tokens, by which it and all behind it on the link come
        sooner. While no other is ready to compute, those who are there lose nothing.
        """
        if candidate.step_load_s <= 0:
            return False
        behind = others_ready * (len(self) - 1) + self._suffixes.more(now_s)
        behind_loads = self._to_load + self._loading.more(now_s)
        return behind * candidate.step_s > behind_loads * candidate.step_load_s

    def _compute_key(self, candidate: Candidate) -> Key:
        return (self._key[candidate.rid], candidate.order)

    def _load_key(self, candidate: Candidate, tier: int) -> Key:
        return (self._turn_of(candidate.rid), self._key[candidate.rid], candidate.order)


_POLICIES: dict[BatchPolicyName, type[Batch]] = {
    BatchPolicyName.RECOMPUTE: _Recompute,
    BatchPolicyName.LOAD: _Load,
    BatchPolicyName.CAKE: _Cake,
    BatchPolicyName.FIFO: Batch,
    BatchPolicyName.LONGEST: _Longest,
    BatchPolicyName.CACHEFLOW: _CacheFlow,
}


def batch(name: BatchPolicyName | str) -> Batch:
    """An empty batch under the policy of that name. `ValueError` where there is none."""
    return _POLICIES[BatchPolicyName(name)]()
