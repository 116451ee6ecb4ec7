"""Writing records: bytes into the active segment first, then one commit makes them visible."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from hicache_tiers.config import round_up
from hicache_tiers.index import IndexLimitError
from hicache_tiers.io_pool import Deadline, HungError, Job
from hicache_tiers.layout import Parts
from hicache_tiers.record import (
    FORMAT,
    Header,
    NamespaceId,
    encode_header,
    entry_key,
    header_bytes,
    layer_checksums,
)
from hicache_tiers.resources import INDEX_TROUBLE, Resources
from hicache_tiers.segments import ActiveSegment
from hicache_tiers.space import now_us
from hicache_tiers.syscalls import write_fully
from hicache_tiers.tables import Entry, IndexBrokenError

_WINDOW = 2  # records in flight for each I/O thread: one being written, one being filled
_COMMIT_SHARE = 0.25  # of a call's time, kept to publish what has been written by then


class Slot:
    """A record to write: what it is, where it goes, and what came of it."""

    def __init__(self, namespace: NamespaceId, key: bytes, source: Parts) -> None:
        self.key = key
        self.name = entry_key(namespace.digest, key)
        self.source = source
        self.header_bytes = header_bytes(namespace, key)
        self.extent_bytes = self.header_bytes + round_up(namespace.layout.payload_bytes)
        self.offset = 0
        self.checksums: bytes | None = None  # set once the bytes are in the file
        self.stored = False
        self.refused = False  # and counted
        self.abandoned = False  # its thread hangs


class Writer:
    """The write half of a store in one process: one batch at a time, one segment at a time."""

    def __init__(self, resources: Resources) -> None:
        self._res = resources
        self._window = _WINDOW * resources.config.io_threads
        self._lock = threading.Lock()  # holds the writer's turn, and with it `_active`
        self._active: ActiveSegment | None = None

    def write(
        self,
        namespace: NamespaceId,
        keys: Sequence[bytes],
        sources: Sequence[Parts],
        deadline: Deadline,
    ) -> list[bool]:
        """Write records that are not there yet, distinct keys; arguments have been checked."""
        slots = [Slot(namespace, key, source) for key, source in zip(keys, sources, strict=True)]
        if not self._lock.acquire(timeout=deadline.left):
            self._refuse(HungError("another write holds the segment"), slots)
            return [False] * len(slots)
        try:
            waiting = deque(slots)
            while waiting:
                batch = self._place(waiting, deadline)
                if not batch:
                    self._res.counters.add(declined=len(waiting))
                    break
                self._write_batch(namespace, batch, deadline)
        except INDEX_TROUBLE as error:
            self._refuse(error, slots)
        finally:
            self._lock.release()
        stored = sum(slot.stored for slot in slots)
        size = namespace.layout.payload_bytes
        self._res.counters.add(written_records=stored, written_bytes=stored * size)
        return [slot.stored for slot in slots]

    def _place(self, waiting: deque[Slot], deadline: Deadline) -> list[Slot]:
        """Give the next slots places in the active segment, or in a new one; none if no room."""
        need = waiting[0].extent_bytes
        if self._active is not None and (self._active.room < need or self._active.unlinked):
            self._retire(self._active, deadline)
        if self._active is None:
            self._active = self._res.index_thread.call(
                lambda: self._res.space.open_segment(need),
                deadline,
                discard=lambda late: late.release() if late is not None else None,
            )
        if self._active is None:
            return []
        batch: list[Slot] = []
        while waiting and self._active.room >= waiting[0].extent_bytes:
            slot = waiting.popleft()
            slot.offset = self._active.tail
            self._active.tail += slot.extent_bytes
            batch.append(slot)
        return batch

    def _write_batch(self, namespace: NamespaceId, batch: list[Slot], deadline: Deadline) -> None:
        """Write a run of slots and publish what arrived; the rest is cut off again."""
        active = self._active
        assert active is not None
        in_time = self._fill(namespace, active, batch, deadline.reserving(_COMMIT_SHARE))
        arrived = [slot for slot in batch if slot.checksums is not None]
        end = arrived[-1].offset + arrived[-1].extent_bytes if arrived else batch[0].offset
        failed = [slot for slot in batch if slot.checksums is None and slot.offset < end]
        gaps = [(slot.offset, slot.extent_bytes) for slot in failed]
        if arrived:
            now = now_us()
            # The later pages of a prefix get the older stamp: it loses its end first.
            records = [
                (slot.name, _entry(active, slot, now - depth)) for depth, slot in enumerate(arrived)
            ]
            try:
                published = self._res.index_thread.call(
                    lambda: self._res.space.publish(active, namespace, records, gaps), deadline
                )
            except HungError:
                self._active = None  # it may still be published: never write there again
                active.release()
                raise
            except (IndexBrokenError, IndexLimitError, OSError):
                self._cut(active, batch[0].offset)
                raise
            if not published:
                self._active = None
                active.release()
                raise OSError(f"segment {active.id} was removed or sealed while it was written")
            for slot in arrived:
                slot.stored = True
        if any(slot.abandoned for slot in batch):
            self._retire(active, deadline)
        elif len(arrived) < len(batch):
            self._cut(active, end)
        if not in_time:
            raise HungError(
                f"the disk did not take all records within {deadline.seconds:g} s: it hangs or is "
                "too slow"
            )

    def _fill(
        self, namespace: NamespaceId, active: ActiveSegment, batch: list[Slot], until: Deadline
    ) -> bool:
        """Have the I/O threads write the slots; False where time ran out, or a thread hangs."""
        flying: deque[tuple[Slot, Job[bytes]]] = deque()
        in_time = True

        def land() -> None:
            nonlocal in_time
            slot, job = flying.popleft()
            try:
                slot.checksums = self._res.pool.wait(job, until)
            except HungError:
                slot.abandoned = True
                in_time = False
            except OSError as error:
                self._refuse(error, [slot])

        for slot in batch:
            if len(flying) == self._window:
                land()
            in_time = in_time and until.left > 0
            if not in_time:
                break
            try:
                work = self._work(namespace, active, slot)
            except OSError as error:  # no memory for another buffer
                self._refuse(error, [slot])
                continue
            flying.append((slot, self._res.pool.submit(work)))
        while flying:
            land()
        return in_time

    def _work(
        self, namespace: NamespaceId, active: ActiveSegment, slot: Slot
    ) -> Callable[[], bytes]:
        """Copy a page now; the part an I/O thread does is to sum it up and write it."""
        layout = namespace.layout
        buffer = self._res.buffers.take(slot.extent_bytes)
        payload = buffer[slot.header_bytes :][: layout.payload_bytes]
        layout.gather(slot.source, payload)
        buffer[slot.header_bytes + layout.payload_bytes : slot.extent_bytes] = 0

        def work() -> bytes:
            try:
                sums = layer_checksums(payload, layout, namespace.digest, slot.key)
                header = np.frombuffer(
                    encode_header(_header(namespace, active, slot, sums)), dtype=np.uint8
                )
                buffer[: slot.header_bytes] = header
                record = buffer.data[: slot.extent_bytes]
                write_fully(self._res.calls, active.fd, record, slot.offset)
                return sums
            finally:
                self._res.buffers.give(buffer)
                if slot.abandoned:  # too late: the segment was sealed without this
                    with contextlib.suppress(OSError):
                        self._res.calls.punch(active.fd, slot.offset, slot.extent_bytes)

        return work

    def _cut(self, active: ActiveSegment, end: int) -> None:
        """Take back what was handed out from `end` on, and the disk blocks of partial writes."""
        active.tail = end
        with contextlib.suppress(OSError):
            self._res.calls.ftruncate(active.fd, end)

    def _retire(self, active: ActiveSegment, deadline: Deadline) -> None:
        """Seal the segment; where that fails it is left to whoever sweeps next."""
        self._active = None
        try:
            self._res.index_thread.call(
                lambda: self._res.space.seal(active.id, active.fd), deadline
            )
        except INDEX_TROUBLE as error:
            self._res.warner.warn("seal", f"segment {active.id} is not sealed yet: {error}")
        finally:
            active.release()

    def _refuse(self, error: Exception, slots: Sequence[Slot]) -> None:
        """Count and report what is not stored, each slot once."""
        refused = [slot for slot in slots if not slot.stored and not slot.refused]
        for slot in refused:
            slot.refused = True
        if isinstance(error, IndexLimitError):
            self._res.counters.add(declined=len(refused))
            self._res.warner.once(
                "index-limit",
                f"{self._res.config.directory}: the index has reached its size limit, writes are "
                "declined: use a larger capacity or larger pages",
            )
        elif isinstance(error, HungError):
            self._res.counters.error("timeout", len(refused))
            self._res.warner.warn(
                "hung", f"{self._res.config.directory}: {len(refused)} records not stored: {error}"
            )
        else:
            self._res.counters.error("write", len(refused))
            self._res.warner.warn("write", f"{self._res.config.directory}: not stored: {error}")

    def seal(self, deadline: Deadline) -> None:
        """Seal the active segment, if there is one: before a clear, a collection, the close."""
        if not self._lock.acquire(timeout=deadline.left):
            return  # the hung writer keeps its segment; the next process to look will sweep it
        try:
            if self._active is not None:
                self._retire(self._active, deadline)
        finally:
            self._lock.release()

    def drop_inherited(self) -> None:
        """Let go of the parent's segment in a forked child."""
        if self._active is not None:
            self._active.drop_inherited()


def _entry(active: ActiveSegment, slot: Slot, stamp: int) -> Entry:
    return Entry(
        FORMAT,
        active.id,
        slot.offset,
        slot.header_bytes,
        slot.extent_bytes,
        stamp,
        slot.checksums or b"",
    )


def _header(namespace: NamespaceId, active: ActiveSegment, slot: Slot, sums: bytes) -> Header:
    layout = namespace.layout
    return Header(
        active.id,
        slot.offset,
        slot.header_bytes,
        layout.payload_bytes,
        namespace.digest,
        namespace.identity,
        layout.layers,
        layout.part_bytes,
        slot.key,
        sums,
    )
