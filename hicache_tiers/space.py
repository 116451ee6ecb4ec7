"""Room on disk: owning segments, publishing into them, eviction, and giving blocks back.

Freeing takes two commits. The first drops records from the index and notes their extents as
*pending*; then the blocks go back to the file system, by a punched hole or by removing the whole
file; the second commit credits them. So a reader that still finds a record finds its bytes, disk
use never exceeds what is charged, and whatever a killed process left pending is settled by the
next one that needs room.

All of this waits for other processes' commits: the store runs it on its index thread, with a
deadline.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from hicache_tiers.config import BLOCK, StoreConfig
from hicache_tiers.index import Index
from hicache_tiers.record import FORMAT, NamespaceId
from hicache_tiers.segments import ActiveSegment, SegmentFiles, try_lock
from hicache_tiers.stats import Counters
from hicache_tiers.syscalls import Syscalls, punch_unsupported
from hicache_tiers.tables import Entry, Segment, Txn
from hicache_tiers.warn import Warner

_KEPT_FREE = 20
"""Eviction goes on until a twentieth of the cap is free, so that it isn't done for every page."""

_OWNERS_SHARE = 4
"""Segments of many owners are kept so small that a good part of the cap stays sealed."""


_TOUCHES_KEPT, _TOUCHES_KEPT_S = 4096, 5.0
"""Accesses, and seconds, kept in memory before they are written to the index."""

_CLOCK_TOLERANCE_US = 60 * 1_000_000
"""A stamp this far ahead of the clock tells that the clock was set back."""


def now_us() -> int:
    """Access stamps: microseconds since the epoch, comparable over processes and restarts."""
    return time.time_ns() // 1000


class Space:
    """The segments of a directory, as one process sees and changes them."""

    def __init__(
        self,
        config: StoreConfig,
        index: Index,
        files: SegmentFiles,
        calls: Syscalls,
        counters: Counters,
        warner: Warner,
    ) -> None:
        self._config = config
        self._index = index
        self._files = files
        self._calls = calls
        self._counters = counters
        self._warner = warner
        self._can_punch = True
        self._stuck: set[int] = set()  # segments whose blocks would not come back
        self._touched: dict[bytes, int] = {}
        self._first_touch = 0.0
        self._touched_lock = threading.Lock()

    # Accesses

    def touch(self, names: Iterable[bytes]) -> bool:
        """Note accesses, in memory; True when it is time to write them to the index."""
        now = now_us()
        with self._touched_lock:
            if not self._touched:
                self._first_touch = time.monotonic()
            # Of one call the later pages get the older stamp: a prefix loses its end first.
            self._touched.update((name, now - depth) for depth, name in enumerate(names))
            waited = time.monotonic() - self._first_touch
            return len(self._touched) >= _TOUCHES_KEPT or waited > _TOUCHES_KEPT_S

    def write_touches(self) -> None:
        """Write noted accesses to the index."""
        with self._index.writing() as txn:
            self._flush(txn)

    def _flush(self, txn: Txn) -> None:
        with self._touched_lock:
            touched, self._touched = self._touched, {}
        lag = _clock_lag(txn, touched.values())
        for name, stamp in touched.items():
            txn.touch(name, stamp + lag)

    # Owning and publishing

    def open_segment(self, need: int) -> ActiveSegment | None:
        """A new segment with room for `need` bytes, reserved in full; None if there is no room.

        `OSError` where the file can't be made.
        """
        with self._index.reading() as txn:
            share = self._config.capacity_bytes // (_OWNERS_SHARE * (len(txn.active()) + 1))
        usual = min(self._config.segment_limit, share // BLOCK * BLOCK)
        for size in (max(usual, need), need):
            state = Segment(active=True, size=size)
            while self.make_room(state.charge):
                active = self._reserve(state)
                if active is not None:
                    return active
        return None

    def _reserve(self, state: Segment) -> ActiveSegment | None:
        """Create a segment; None where another process took the room meanwhile."""
        active = None
        try:
            with self._index.writing() as txn:
                self._flush(txn)
                if txn.used() + state.charge > self._config.capacity_bytes:
                    return None
                while active is None:
                    active = self._files.create(txn.new_segment_id(), state.size)
                txn.put_segment(active.id, state)
        except BaseException:
            if active is not None:
                self._files.uncreate(active)
            raise
        return active

    def publish(
        self,
        active: ActiveSegment,
        namespace: NamespaceId,
        records: Sequence[tuple[bytes, Entry]],
        gaps: Iterable[tuple[int, int]],
    ) -> bool:
        """Make records visible, by one commit; False where the segment is gone, or sealed.

        `gaps` are (offset, length) of extents in between that hold nothing. A record that another
        writer published meanwhile is a gap too.
        """
        if active.unlinked:
            self.lose(active.id)
            return False
        with self._index.writing() as txn:
            state = txn.segment(active.id)
            if state is None or not state.active:
                return False  # this comes late: it was given up and sealed by somebody else
            for offset, length in gaps:
                txn.add_pending(active.id, offset, length)
            lag = _clock_lag(txn, [entry.stamp for _, entry in records])
            for name, entry in records:
                there = txn.entry(name)
                if there is not None and there.format == FORMAT:
                    txn.add_pending(active.id, entry.offset, entry.extent_bytes)
                    continue
                if there is not None:
                    txn.remove(name, there)
                txn.add(name, msgspec.structs.replace(entry, stamp=entry.stamp + lag))
            txn.name_namespace(namespace)
            self._flush(txn)
        return True

    def seal(self, segment: int, fd: int) -> None:
        """Close a segment that this process owns, or whose dead owner's lock it holds.

        The file is cut to what was published; if it is gone, so are its records. `OSError`
        leaves the segment active: without a lock, the next sweep tries again.
        """
        if os.fstat(fd).st_nlink == 0:
            self.lose(segment)
            return
        with self._index.writing() as txn:
            state = txn.segment(segment)
            if state is None or not state.active:
                return
            end = txn.published_end(segment)
            self._calls.ftruncate(fd, end)  # under the lock: nothing more is published beyond it
            state = msgspec.structs.replace(state, active=False, size=end)
            txn.put_segment(segment, state)
            if state.empty and not state.pending_bytes:
                txn.add_pending(segment, 0, 0)  # has the file removed
        self.settle()

    def sweep(self) -> int:
        """Seal the segments of dead owners; how many."""
        self._index.free_dead_readers()
        with self._index.reading() as txn:
            active = txn.active()
        return sum(self._sweep_one(segment) for segment in active)

    def _sweep_one(self, segment: int) -> bool:
        try:
            fd = self._files.open_to_change(segment)
        except FileNotFoundError:
            self.lose(segment)
            return True
        except OSError as error:
            self._warner.warn("sweep", f"segment {segment} can't be swept: {error}")
            return False
        try:
            if not try_lock(fd):
                return False
            self.seal(segment, fd)
            return True
        except OSError as error:
            self._warner.warn("sweep", f"segment {segment} can't be sealed: {error}")
            return False
        finally:
            os.close(fd)

    # Freeing

    def tidy(self) -> None:
        """What every open does: seal dead owners' segments, free what is pending.

        The cap waits for the first write: opening a store, for a look or with a smaller cap by
        mistake, costs nobody a record.
        """
        self.sweep()
        with self._index.writing() as txn, contextlib.suppress(OSError):
            # Under the lock nobody is creating it: a process died before it could enter the id.
            self._files.remove(txn.next_segment())
        self.settle()

    def remove(self, records: Iterable[tuple[bytes, Entry]]) -> None:
        """Drop these records, unless they have been replaced since, and free their blocks."""
        with self._index.writing() as txn:
            for name, entry in records:
                there = txn.entry(name)
                if there is not None and same_place(there, entry):
                    txn.remove(name, there)
        self.settle()

    def clear_namespace(self, digest: bytes) -> None:
        """Drop every record of a namespace."""
        with self._index.reading() as txn:
            records = list(txn.entries(digest))
        self.remove(records)

    def lose(self, segment: int) -> int:
        """Drop a segment whose file is gone, and its records; how many."""
        self._files.discard(segment)
        with self._index.writing() as txn:
            return txn.drop_segment(segment) if txn.segment(segment) is not None else 0

    def clear(self) -> None:
        """Drop every record of the directory."""
        with self._index.writing() as txn:
            txn.clear()
        with self._touched_lock:
            self._touched.clear()
        self._stuck.clear()
        self.settle()

    def make_room(self, need: int, capacity: int | None = None) -> bool:
        """Free blocks until `need` bytes fit below the cap; False where nothing is left to free.

        `capacity` stands in for the configured cap.
        Dead owners' segments and pending extents come first, then the least recently used.
        """
        capacity = capacity or self._config.capacity_bytes
        if self._fits(need, capacity):
            return True
        self.sweep()
        self.settle()
        while not self._fits(need, capacity):
            if not self._evict(need, capacity):
                return False
            self.settle()
        return True

    def _fits(self, need: int, capacity: int) -> bool:
        with self._index.reading() as txn:
            return txn.used() + need <= capacity

    def _evict(self, need: int, capacity: int) -> int:
        """Drop the coldest records of sealed segments to fit `need` bytes; how many."""
        with self._index.writing() as txn:
            self._flush(txn)
            if need > capacity - self._immovable(txn):
                return 0
            goal = txn.used() - min(capacity - need, capacity - capacity // _KEPT_FREE)
            victims: dict[bytes, Entry] = {}
            freed = 0
            for name in txn.coldest():
                if freed >= goal:
                    break
                entry = txn.entry(name)
                if entry is None or name in victims or self._is_active(txn, entry.segment):
                    continue
                chosen = self._with_neighbours(txn, name, entry)
                victims.update(chosen)
                if entry.segment not in self._stuck:
                    freed += sum(entry.extent_bytes for entry in chosen.values())
            for name, entry in victims.items():
                txn.remove(name, entry)
        size = sum(entry.extent_bytes for entry in victims.values())
        self._counters.add(evicted=len(victims), evicted_bytes=size)
        return len(victims)

    def _immovable(self, txn: Txn) -> int:
        """Bytes charged for segments in which eviction frees nothing."""
        fixed = self._stuck.union(txn.active())
        return sum(state.charge for s in fixed if (state := txn.segment(s)) is not None)

    def _is_active(self, txn: Txn, segment: int) -> bool:
        state = txn.segment(segment)
        return state is None or state.active

    def _with_neighbours(self, txn: Txn, name: bytes, entry: Entry) -> dict[bytes, Entry]:
        """The victim alone, or its whole segment where single extents can't be freed."""
        if self._can_punch:
            return {name: entry}
        names = [neighbour for _, neighbour in txn.extents(entry.segment)]
        return {name: found for name in names if (found := txn.entry(name)) is not None}

    def settle(self, again: bool = False) -> None:
        """Give pending extents back to the file system and credit them.

        What can't be freed (S6: an unremovable file) stays charged and is left alone from then
        on, so that it stops nobody; `again` tries that too.
        """
        if again:
            self._stuck.clear()
        with self._index.reading() as txn:
            pending: dict[int, list[tuple[int, int]]] = {}
            for segment, offset, length in txn.pending():
                pending.setdefault(segment, []).append((offset, length))
            states = {segment: txn.segment(segment) for segment in pending}
        freed: list[tuple[int, list[tuple[int, int]], bool]] = []
        for segment, extents in pending.items():
            state = states[segment]
            if state is None or segment in self._stuck:
                continue
            with self._sticking(segment):
                if state.empty:
                    self._files.remove(segment)
                    freed.append((segment, extents, True))
                elif self._can_punch and self._punch(segment, extents):
                    freed.append((segment, extents, False))
        if freed:
            self._credit(freed)

    @contextlib.contextmanager
    def _sticking(self, segment: int) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            self.lose(segment)
        except OSError as error:
            self._stuck.add(segment)
            self._warner.warn(
                "stuck",
                f"segment {segment} can't be freed ({error}), its space stays lost: "
                f"check the permissions of {self._files.path(segment)}",
            )

    def _punch(self, segment: int, extents: Sequence[tuple[int, int]]) -> bool:
        """Punch holes for extents; False on a file system that can't."""
        fd = self._files.open_to_change(segment)
        try:
            for offset, length in extents:
                if length:
                    self._calls.punch(fd, offset, length)
        except OSError as error:
            if not punch_unsupported(error):
                raise
            self._can_punch = False
            self._warner.once(
                "punch",
                f"{self._config.directory}: the file system can't punch holes; "
                "room is made by whole segment files instead",
            )
            return False
        finally:
            os.close(fd)
        return True

    def _credit(self, freed: Iterable[tuple[int, list[tuple[int, int]], bool]]) -> None:
        with self._index.writing() as txn:
            for segment, extents, removed in freed:
                state = txn.segment(segment)
                if state is None:
                    continue  # another process did it
                if removed and state.empty:
                    txn.drop_segment(segment)
                    continue
                for offset, length in extents:
                    txn.settle(segment, offset, length)


def _clock_lag(txn: Txn, stamps: Iterable[int]) -> int:
    """What to add to new stamps where the clock was set back, or all that is new went first.

    They then follow the newest one there is: the order of commits stands in for the clock.
    """
    newest = txn.newest_stamp()
    if newest < now_us() + _CLOCK_TOLERANCE_US:
        return 0
    return newest + 1 - min(stamps, default=newest)


def same_place(one: Entry, other: Entry) -> bool:
    """Whether two entries mean the same bytes: places are never used twice."""
    return (one.segment, one.offset) == (other.segment, other.offset)
