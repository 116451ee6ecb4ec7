"""Who brings which cells of a restore back: claims over chunk x layer.

What `pointers` does for tokens, for plans that also split by layer (CacheFlow, arXiv 2604.25080;
see `staircase`). A cell is the KV of one chunk at one layer.

    layers
      L  | L L L L L L |      compute >>> chunk by chunk from the front, from the lowest layer up;
         | L L L . L L |      what lies above in a chunk that compute has claimed (L) can only be
         | C C . . . L |      loaded from then on, and is loaded first, lowest layer first;
      0  | C C . . . L |      <<< loads take the rest from the tail, highest layer first.
          chunks     J

Compute needs the layers below of all chunks before, so it never goes higher in a chunk than in the
one before it. A chunk that no tier has, or of which a load failed, is a hole: compute takes all its
layers at once, when all before it is there.

Each tier has its own link, and loads of a tier go on by themselves: its rests, then its own tail.
Where chunks of another tier lie behind that tail, compute can't pass what was loaded of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.staircase import HOLE


class ComputeCells(NamedTuple):
    """Layers [0, layers) of a chunk, claimed by compute."""

    chunk: int
    layers: int


class LoadCells(NamedTuple):
    """Layers [start, stop) of a chunk, claimed by a load."""

    chunk: int
    start: int
    stop: int

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return self.stop - self.start


@dataclass(slots=True)
class _Chunk:
    """One chunk: layers [0, computed) are claimed by compute, [low, high) by nobody.

    `low` is `computed` but for loads that came upward; loads that came downward have [high, L).
    """

    tier: int
    high: int
    low: int = 0
    computed: int = 0
    computing: bool = False
    landed: int = 0
    in_flight: int = 0
    """Loads, not layers."""

    @property
    def hole(self) -> bool:
        return self.tier == HOLE

    @property
    def unclaimed(self) -> int:
        return self.high - self.low

    @property
    def needs_compute(self) -> bool:
        """Whether compute can still have a part of it."""
        return not self.computed and self.high > 0

    @property
    def has_room(self) -> bool:
        """Whether loads may take it from the top."""
        return not (self.hole or self.computed) and self.high > 0

    @property
    def there(self) -> int:
        """Layers that landed or that compute has claimed: it has them when it comes to the next."""
        return self.computed + self.landed


@dataclass(slots=True)
class _Queue:
    """Chunks of one tier in the order in which loads take them; some may have no room any more."""

    rests: deque[int] = field(default_factory=deque)
    """Those of which loads have to bring the rest, front to back."""
    tails: deque[int] = field(default_factory=deque)
    """The others: segment by segment, each from its tail."""


class CellClaims:
    """Claims on the cells of one restore, of J chunks and L layers; counts are in cells.

    One thread is the compute lane, which works on its claims in order; any number of threads may be
    I/O lanes, and loads may land in any order. The restore has `finished` when every cell is
    computed or landed.
    """

    def __init__(self, chunks: Sequence[Span], layers: int, tiers: Sequence[int]) -> None:
        """`ValueError` unless the chunks follow each other and there is a tier for each.

        Args:
            chunks: the chunks of the restore, front to back.
            layers: layers of the model, or of this pipeline stage.
            tiers: of each chunk the tier that it is loaded from, or `HOLE`.
        """
        if not chunks or layers < 1:
            raise ValueError(f"nothing to restore: {len(chunks)} chunks of {layers} layers")
        if any(low.stop != high.start for low, high in pairwise(chunks)):
            raise ValueError(f"chunks must follow each other without gaps: {chunks}")
        if len(tiers) != len(chunks):
            raise ValueError(f"{len(chunks)} chunks, but tiers of {len(tiers)}")
        self._spans = tuple(chunks)
        self._layers = layers
        self._chunks = [_Chunk(tier, high=layers) for tier in tiers]
        self._next = 0  # no chunk before it needs compute
        self._there = 0  # all cells before this chunk are there, and stay so
        self._queues = {tier: _Queue() for tier in set(tiers) - {HOLE}}
        self._running: set[LoadCells | ComputeCells] = set()
        self._loads = 0
        self._unclaimed = sum(tier != HOLE for tier in tiers) * layers
        self._computed = self._loaded = self._wasted = 0
        self._queue_tails()
        self._lock = threading.Lock()

    # -- the compute lane (one thread)

    def claim_compute(self, layers: int) -> ComputeCells | None:
        """Claim up to `layers` layers of the next chunk; all layers of a hole.

        None where that is less than one layer, or where compute has to wait for loads: before a
        hole for those of all cells before it, and at the end. Each claim must end in `computed`.
        """
        with self._lock:
            number = self._next_chunk()
            if number is None or layers < 1:
                return None
            chunk = self._chunks[number]
            free = self._free(number)
            chunk.computed = free if chunk.hole else min(layers, free)
            if not chunk.computed:
                return None
            chunk.computing = True
            if not chunk.hole:
                self._unclaimed -= chunk.computed
                self._queues[chunk.tier].rests.append(number)
            chunk.low = chunk.computed
            claim = ComputeCells(number, chunk.computed)
            self._running.add(claim)
            return claim

    def computed(self, cells: ComputeCells) -> None:
        """The claim's cells are computed. `ValueError` where it is not on its way."""
        with self._lock:
            self._end(cells)
            chunk = self._chunks[cells.chunk]
            chunk.computing = False
            if chunk.computed:
                self._computed += cells.layers
            else:  # it became a hole meanwhile
                self._wasted += cells.layers

    # -- I/O lanes (any thread)

    def claim_load(self, layers: int, tier: int) -> LoadCells | None:
        """Claim up to `layers` layers of one chunk of a tier.

        First, upward, the rest of chunks that compute has claimed a part of, front to back. Then,
        downward, the last chunk with room of the front-most segment that has one; holes are between
        segments. None where nothing is left to load from the tier, or `layers` is less than 1. Each
        claim must end in `landed` or `failed`.
        """
        with self._lock:
            number = self._next_load(tier)
            if layers < 1 or number is None:
                return None
            claim = self._take(number, layers)
            self._chunks[claim.chunk].in_flight += 1
            self._unclaimed -= claim.layers
            self._loads += 1
            self._running.add(claim)
            return claim

    def landed(self, cells: LoadCells) -> None:
        """The claim's cells are there. `ValueError` where it is not on its way."""
        with self._lock:
            chunk = self._end_load(cells)
            if chunk.hole:
                self._wasted += cells.layers
            else:
                chunk.landed += cells.layers
                self._loaded += cells.layers

    def failed(self, cells: LoadCells) -> None:
        """The claim's cells will not come: its chunk becomes a hole, all of it to be computed.

        What else was computed or loaded of it is wasted; the chunks behind it stay useful. To be
        called when nothing can write to these cells any more. `ValueError` where it is not on its
        way.
        """
        with self._lock:
            if not self._end_load(cells).hole:
                self._make_hole(cells.chunk)
                self._queue_tails()

    def stop_loading(self) -> None:
        """No load claims from now on: chunks with unclaimed cells become holes.

        Loads on their way go on; those of such a chunk are wasted.
        """
        with self._lock:
            for number, chunk in enumerate(self._chunks):
                if chunk.unclaimed and not chunk.hole:
                    self._make_hole(number)

    # -- what can be seen

    @property
    def finished(self) -> bool:
        """Every cell is computed or landed."""
        with self._lock:
            return self._computed + self._loaded == len(self._chunks) * self._layers

    @property
    def position(self) -> int:
        """The token up to which all cells are computed or landed."""
        with self._lock:
            for span, chunk in zip(self._spans, self._chunks, strict=True):
                if chunk.computing or chunk.there < self._layers:
                    return span.start
            return self._spans[-1].stop

    @property
    def next_chunk(self) -> int | None:
        """The chunk that compute claims next, now or when loads have landed; None for none."""
        with self._lock:
            return self._next_chunk()

    @property
    def ceiling(self) -> int:
        """The most layers that `claim_compute` would claim now."""
        with self._lock:
            number = self._next_chunk()
            return 0 if number is None else self._free(number)

    def next_load(self, tier: int) -> int | None:
        """The chunk that `claim_load` would take a part of now; None where nothing is left."""
        with self._lock:
            return self._next_load(tier)

    @property
    def unclaimed_load(self) -> int:
        """Cells that loads may still claim, of all tiers; compute may come before them."""
        with self._lock:
            return self._unclaimed

    @property
    def loads_in_flight(self) -> int:
        """How many load claims are on their way."""
        with self._lock:
            return self._loads

    @property
    def computed_cells(self) -> int:
        """Cells computed that stay useful."""
        with self._lock:
            return self._computed

    @property
    def loaded_cells(self) -> int:
        """Cells landed that stay useful."""
        with self._lock:
            return self._loaded

    @property
    def wasted_cells(self) -> int:
        """Cells computed or landed of chunks that became holes later: computed once more."""
        with self._lock:
            return self._wasted

    @property
    def meetings(self) -> tuple[int, ...]:
        """Layers of each chunk that compute has claimed."""
        with self._lock:
            return tuple(chunk.computed for chunk in self._chunks)

    def check_integrity(self) -> None:
        """`AssertionError`, with a full picture, where any two facts contradict each other."""
        with self._lock:
            faults = (self._chunk_fault(number) for number in range(len(self._chunks)))
            fault = next((fault for fault in faults if fault), None) or self._fault()
            if fault is not None:
                raise AssertionError(f"{fault}: {self._picture()}")

    # -- inside, under the lock

    def _next_chunk(self) -> int | None:
        while self._next < len(self._chunks) and not self._chunks[self._next].needs_compute:
            self._next += 1
        return self._next if self._next < len(self._chunks) else None

    def _free(self, number: int) -> int:
        """Layers of the next chunk that compute may claim now."""
        chunk = self._chunks[number]
        if not chunk.hole:
            before = self._chunks[number - 1].computed if number else self._layers
            return min(chunk.high, before)
        while self._there < number and self._chunks[self._there].there == self._layers:
            self._there += 1
        waits = self._there < number or chunk.computing or chunk.in_flight
        return 0 if waits else self._layers

    def _next_load(self, tier: int) -> int | None:
        queue = self._queues.get(tier)
        if queue is None:
            return None
        while queue.rests:
            chunk = self._chunks[queue.rests[0]]
            if not chunk.hole and chunk.unclaimed:
                return queue.rests[0]
            queue.rests.popleft()
        while queue.tails and not self._chunks[queue.tails[0]].has_room:
            queue.tails.popleft()
        return queue.tails[0] if queue.tails else None

    def _take(self, number: int, layers: int) -> LoadCells:
        """Claim from the bottom of a rest, or else from the top."""
        chunk = self._chunks[number]
        if chunk.computed:
            claim = LoadCells(number, chunk.low, min(chunk.low + layers, chunk.high))
            chunk.low = claim.stop
        else:
            claim = LoadCells(number, max(chunk.high - layers, 0), chunk.high)
            chunk.high = claim.start
        return claim

    def _queue_tails(self) -> None:
        """Sort what loads take downward: to be done again when there is a new hole."""
        for queue in self._queues.values():
            queue.tails.clear()
        numbers = range(len(self._chunks))
        for hole, segment in groupby(numbers, key=lambda number: self._chunks[number].hole):
            if not hole:
                for number in reversed(list(segment)):
                    self._queues[self._chunks[number].tier].tails.append(number)

    def _make_hole(self, number: int) -> None:
        chunk = self._chunks[number]
        computed = 0 if chunk.computing else chunk.computed
        self._computed -= computed
        self._loaded -= chunk.landed
        self._wasted += computed + chunk.landed
        self._unclaimed -= chunk.unclaimed
        chunk.tier, chunk.low, chunk.high = HOLE, 0, self._layers
        chunk.computed = chunk.landed = 0
        self._next = min(self._next, number)

    def _end_load(self, cells: LoadCells) -> _Chunk:
        self._end(cells)
        self._loads -= 1
        chunk = self._chunks[cells.chunk]
        chunk.in_flight -= 1
        return chunk

    def _end(self, cells: LoadCells | ComputeCells) -> None:
        if cells not in self._running:
            raise ValueError(f"{cells} is not on its way")
        self._running.remove(cells)

    def _chunk_fault(self, number: int) -> str | None:
        """What is wrong with a chunk and its claims, if anything."""
        chunk = self._chunks[number]
        claims = [claim for claim in self._running if claim.chunk == number]
        loads = [claim for claim in claims if isinstance(claim, LoadCells)]
        if chunk.in_flight != len(loads) or chunk.computing != len(claims) - len(loads):
            return f"claims of chunk {number} were lost"
        if chunk.hole:
            ends = (chunk.computed, chunk.low, chunk.high, chunk.landed)
            claimed = (self._layers, self._layers, self._layers, 0)
            whole = (ends == claimed and not loads) or ends == (0, 0, self._layers, 0)
            return None if whole else f"chunk {number} is a hole in parts"
        if not 0 <= chunk.computed <= chunk.low <= chunk.high <= self._layers:
            return f"the claims of chunk {number} have passed each other"
        before = self._chunks[number - 1]
        if number and not before.hole and chunk.computed > before.computed:
            return f"compute is higher in chunk {number} than before it"
        taken = {*range(chunk.computed, chunk.low), *range(chunk.high, self._layers)}
        flying = [layer for load in loads for layer in range(load.start, load.stop)]
        if len(set(flying)) < len(flying) or not taken.issuperset(flying):
            return f"loads of chunk {number} overlap, or have left their place"
        return None if chunk.landed + len(flying) == len(taken) else f"chunk {number} lost loads"

    def _fault(self) -> str | None:
        """What is wrong with the counts, if anything."""
        chunks = self._chunks
        counts = (self._computed, self._loaded, self._unclaimed, self._loads)
        counted = (
            sum(chunk.computed for chunk in chunks if not chunk.computing),
            sum(chunk.landed for chunk in chunks),
            sum(chunk.unclaimed for chunk in chunks if not chunk.hole),
            sum(chunk.in_flight for chunk in chunks),
        )
        if counts != counted:
            return f"computed, loaded, unclaimed, loads are {counted}, not {counts}"
        for number, chunk in enumerate(chunks):
            if not chunk.hole and chunk.unclaimed and not self._is_queued(number):
                return f"no load would come for the rest of chunk {number}"
        if any(chunk.needs_compute for chunk in chunks[: self._next]):
            return "compute has passed a chunk"
        if any(chunk.there < self._layers for chunk in chunks[: self._there]):
            return "cells are missing before a hole"
        return None

    def _is_queued(self, number: int) -> bool:
        chunk = self._chunks[number]
        queue = self._queues[chunk.tier]
        return number in (queue.rests if chunk.computed else queue.tails)

    def _picture(self) -> str:
        lines = [f"{self._layers} layers, next {self._next}, there {self._there}"]
        lines += [f"{number}: {chunk}" for number, chunk in enumerate(self._chunks)]
        lines += [f"running {self._running}, queues {self._queues}, wasted {self._wasted}"]
        return "\n".join(lines)
