"""Reading records: right bytes, a miss, or a miss that forgets the record. Never an error."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hicache_tiers.io_pool import Deadline, HungError, Job
from hicache_tiers.layout import Bytes, Parts
from hicache_tiers.record import FORMAT, NamespaceId, entry_key, key_bytes, layer_checksums
from hicache_tiers.resources import Resources
from hicache_tiers.space import same_place
from hicache_tiers.syscalls import read_fully
from hicache_tiers.tables import Entry

_WINDOW = 2
"""Records in flight for each I/O thread: one being read, one waiting to be copied out."""

_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Failures of this process, which say nothing about the record."""


class CorruptError(Exception):
    """The bytes that came back are not the ones stored."""


class Reader:
    """The read half of a store in one process."""

    def __init__(self, resources: Resources) -> None:
        self._res = resources
        self._window = _WINDOW * resources.config.io_threads

    def look_up(self, names: list[bytes]) -> list[Entry | None]:
        """The entry of each entry key; None without one, or with one of another format."""
        found = self._res.look_up(names)
        return [entry if entry and entry.format == FORMAT else None for entry in found]

    def read(
        self,
        namespace: NamespaceId,
        keys: Sequence[str],
        targets: Sequence[Parts],
        layers: range,
        deadline: Deadline,
    ) -> list[bool]:
        """See `Namespace.read`; arguments have been checked."""
        raw_keys = [key_bytes(key) for key in keys]
        names = [entry_key(namespace.digest, key) for key in raw_keys]
        entries = self.look_up(names)
        results = [False] * len(keys)
        doubtful: list[tuple[bytes, Entry, Exception]] = []
        flying: deque[tuple[int, Entry, Job[Bytes]]] = deque()
        late = 0
        size = len(layers) * namespace.layout.layer_bytes

        def land() -> None:
            nonlocal late
            number, entry, job = flying.popleft()
            try:
                buffer = self._res.pool.wait(job, deadline)
            except HungError:
                late += 1
            except (CorruptError, OSError) as error:
                doubtful.append((names[number], entry, error))
            else:
                namespace.layout.scatter(buffer[:size], targets[number])
                self._res.buffers.give(buffer)
                results[number] = True

        for number, entry in enumerate(entries):
            if entry is None:
                continue
            if len(flying) == self._window:
                land()
            if late or not deadline.left:
                late += 1  # a disk that does not answer is not asked for more
                continue
            work = self._work(namespace, raw_keys[number], entry, layers)
            flying.append((number, entry, self._res.pool.submit(work, self._res.buffers.give)))
        while flying:
            land()
        if late:
            self._report_late(late, deadline)
        self._judge(doubtful, deadline)
        self._account(names, results, size)
        return results

    def _report_late(self, records: int, deadline: Deadline) -> None:
        self._res.counters.error("timeout", records)
        self._res.warner.warn(
            "hung",
            f"{self._res.config.directory}: {records} records were not read within "
            f"{deadline.seconds:g} s and count as misses: the disk hangs or is too slow",
        )

    def _work(
        self, namespace: NamespaceId, key: bytes, entry: Entry, layers: range
    ) -> Callable[[], Bytes]:
        """The part of a read that an I/O thread does: bytes into a private buffer, verified."""
        layout = namespace.layout
        start, size = layout.layer_range(layers.start, layers.stop)
        expected = entry.checksums[8 * layers.start : 8 * layers.stop]

        def work() -> Bytes:
            buffer = self._res.buffers.take(size)
            payload = buffer[:size]
            place = entry.offset + entry.header_bytes + start
            try:
                with self._res.files.reading(entry.segment) as fd:
                    count = read_fully(self._res.calls, fd, payload.data, place)
                if count < size:
                    raise CorruptError(f"{size - count} of {size} bytes are missing")
                sums = layer_checksums(payload, layout, namespace.digest, key, layers.start)
                if sums != expected:
                    raise CorruptError("the checksum differs")
            except BaseException:
                self._res.buffers.give(buffer)
                raise
            return buffer

        return work

    def _judge(
        self, doubtful: Sequence[tuple[bytes, Entry, Exception]], deadline: Deadline
    ) -> None:
        """Tell records that were evicted under the reader (plain misses) from damaged ones."""
        if not doubtful:
            return
        entries = self.look_up([name for name, _, _ in doubtful])
        damaged: list[tuple[bytes, Entry]] = []
        lost: set[int] = set()
        for (name, seen, error), entry in zip(doubtful, entries, strict=True):
            if entry is None or not same_place(entry, seen):
                self._res.files.discard(seen.segment)
                continue
            if isinstance(error, FileNotFoundError):
                lost.add(seen.segment)
            elif not isinstance(error, OSError) or error.errno not in _OURS:
                damaged.append((name, seen))
            self._res.counters.error("read" if isinstance(error, OSError) else "corrupt")
            path = self._res.files.path(seen.segment)
            self._res.warner.warn("damaged", f"record lost, {path} at {seen.offset}: {error}")
        for segment in lost:
            self._res.change_index(partial(self._res.space.lose, segment), deadline)
        if damaged:
            self._res.change_index(lambda: self._res.space.remove(damaged), deadline)

    def _account(self, names: Sequence[bytes], results: Sequence[bool], size: int) -> None:
        hits = [name for name, hit in zip(names, results, strict=True) if hit]
        missed = len(names) - len(hits)
        self._res.counters.add(hits=len(hits), misses=missed, read_bytes=len(hits) * size)
        if hits:
            self._res.touch(hits)
