"""The disk tier: pages as checksummed records in segment files, found by an index."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from hicache_tiers import maintenance
from hicache_tiers.config import StoreConfig
from hicache_tiers.directory import Directory
from hicache_tiers.errors import StoreError
from hicache_tiers.index import Index, why_damaged
from hicache_tiers.io_pool import Buffers, IoPool
from hicache_tiers.layout import Parts, RecordLayout
from hicache_tiers.reader import Reader
from hicache_tiers.rebuild import rebuild
from hicache_tiers.record import NamespaceId, entry_key, key_bytes
from hicache_tiers.segments import SegmentFiles
from hicache_tiers.space import Space
from hicache_tiers.stats import Counters, GcReport, NamespaceInfo, TierStats, Usage, VerifyReport
from hicache_tiers.syscalls import Syscalls
from hicache_tiers.tables import IndexBrokenError
from hicache_tiers.warn import Warner
from hicache_tiers.writer import Writer

_registry_lock = threading.Lock()
_stores: dict[str, DiskStore] = {}
"""Stores open in this process, by real path of their directory."""


class DiskStore:
    """A directory of KV pages, shared by any number of threads, processes and ranks.

    A write becomes visible by one index commit, after its bytes are in the segment file; a read
    is the right bytes or a miss. Neither raises for I/O trouble. After a fork the child has the
    store open too, as a process of its own.
    """

    def __init__(self, config: StoreConfig, calls: Syscalls) -> None:
        """Use `open`."""
        self.config = config
        self._calls = calls
        self._counters = Counters()
        self._warner = Warner()
        self._opens = 1
        self._directory = Directory(config)
        self._start()

    @classmethod
    def open(cls, config: StoreConfig, calls: Syscalls | None = None) -> Self:
        """Open the directory, made if it is missing.

        One store per directory and process, reference-counted: a second open returns the same
        one, each open needs its `close`. `StoreError` where the directory can't be used, or is
        open in this process with other settings. `calls` is for tests that inject faults.
        """
        with _registry_lock:
            path = os.path.realpath(config.directory)
            store = _stores.get(path)
            if store is None:
                store = _stores[path] = cls(config, calls or Syscalls())
            elif store.config != config:
                raise StoreError(
                    f"{config.directory} is open in this process with other settings "
                    f"({store.config}); use the same everywhere"
                )
            else:
                store._opens += 1
            assert isinstance(store, cls)
            return store

    def close(self) -> None:
        """Give back this open; the last one seals the segment and closes the index."""
        with _registry_lock:
            self._opens -= 1
            if self._opens:
                return
            _stores.pop(os.path.realpath(self.config.directory), None)
        self._stop()

    def _start(self) -> None:
        """Take the directory and build the parts of this process."""
        config = self.config
        alone = self._directory.enter()
        try:
            if alone:
                self._repair()
                self._directory.share()
            self._directory.check_index()
            limit = self._directory.format().index_limit_bytes
            self._index = Index(self._directory.index, limit)
        except (IndexBrokenError, OSError) as error:
            self._directory.leave()
            raise StoreError(
                f"cannot open the index of {config.directory}: {error}; check the space and the "
                "permissions there"
            ) from error
        except BaseException:
            self._directory.leave()
            raise
        self._files = SegmentFiles(self._directory.segments, self._calls)
        self._pool = IoPool("store-io", config.io_threads, config.deadline_s)
        # One thread: lmdb has one writer at a time, and a hung commit must not take the readers'.
        self._index_thread = IoPool("store-index", 1, config.deadline_s)
        self._buffers = Buffers(spare=2 * config.io_threads)
        self._space = Space(
            config, self._index, self._files, self._calls, self._counters, self._warner
        )
        self._reader = Reader(
            self._index,
            self._files,
            self._space,
            self._pool,
            self._index_thread,
            self._buffers,
            self._calls,
            self._counters,
            self._warner,
            config.io_threads,
        )
        self._writer = Writer(
            config,
            self._space,
            self._pool,
            self._index_thread,
            self._buffers,
            self._calls,
            self._counters,
            self._warner,
        )
        self._reader.change_index(self._space.tidy)

    def _repair(self) -> None:
        """Make the index usable, being alone in the directory."""
        limit = self._directory.format().index_limit_bytes
        if why_damaged(self._directory.index) is None:
            try:
                index = Index(self._directory.index, limit)
                with index.writing() as txn:
                    txn.recompute_used()
                index.close(timeout_s=0.0)
                return
            except IndexBrokenError:
                pass
        rebuild(self._directory.index, limit, self._directory.segments)

    def _stop(self) -> None:
        self._writer.seal()
        self._reader.change_index(self._space.write_touches)
        self._pool.close()
        self._index_thread.close()
        self._index.close(self.config.deadline_s)
        self._files.close()
        self._directory.leave()

    def _after_fork(self) -> None:
        """In a forked child: let go of what is the parent's and start anew."""
        self._writer.drop_inherited()
        self._files.close()
        self._index.drop_inherited()
        self._directory.leave()
        self._start()

    def namespace(self, identity: Mapping[str, str | int], layout: RecordLayout) -> Namespace:
        """The records of one identity: model fingerprint, dtype, page size, shard and the like.

        Identity, layout and format version are hashed together; anything that differs is another
        namespace. `StoreError` for an identity that isn't text and whole numbers.
        """
        return Namespace(self, NamespaceId.of(identity, layout))

    def clear(self) -> None:
        """Drop every record of the directory, all namespaces."""
        self._writer.seal()
        self._reader.change_index(self._space.clear)

    def stats(self) -> TierStats:
        """Counters of this process."""
        return self._counters.snapshot()

    def usage(self) -> Usage:
        """What the directory holds now, over all processes. `StoreError` without an index."""
        return maintenance.usage(self.config, self._index)

    def namespaces(self) -> list[NamespaceInfo]:
        """The namespaces of the directory, newest access first. `StoreError` without an index."""
        return maintenance.namespaces(self._index)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read every record and check header and every layer; nothing is changed.

        `progress` is called with (records done, records in all). `StoreError` without an index.
        """
        return maintenance.verify(self._index, self._files, self._calls, progress)

    def gc(self) -> GcReport:
        """Sweep dead owners' leftovers, drop what is unreachable, apply the cap.

        `StoreError` where the index can't be changed.
        """
        self._writer.seal()
        return maintenance.collect(self._index, self._files, self._space, self._counters)

    def check_integrity(self) -> None:
        """`IntegrityError` where index and segments contradict each other; for quiet moments."""
        maintenance.check_integrity(self._index, self._files)


class Namespace:
    """The records of one identity and layout. Every call is safe from any thread."""

    def __init__(self, store: DiskStore, namespace: NamespaceId) -> None:
        """Use `DiskStore.namespace`."""
        self._store = store
        self._id = namespace

    @property
    def layout(self) -> RecordLayout:
        """Sizes of the pages here."""
        return self._id.layout

    @property
    def id(self) -> str:
        """32 hex digits that stand for identity, layout and format version."""
        return self._id.digest.hex()

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key has a record now. One index look-up a key, no disk access."""
        found = self._store._reader.look_up([self._name(key) for key in keys])
        return [entry is not None for entry in found]

    def read(
        self, keys: Sequence[str], targets: Sequence[Parts], layers: range | None = None
    ) -> list[bool]:
        """Copy each record, or its `layers` only, into its target.

        True only where every byte landed and its checksum holds; after False the content of
        that target is undefined. `targets[i]` has one uint8 array a part whose leading dimension
        is ``len(layers)`` (all layers by default). Nothing writes into a target once this has
        returned. Only misuse raises (`ValueError`: shapes, a range outside the layout).
        """
        wanted = range(self.layout.layers) if layers is None else layers
        if wanted.step != 1:
            raise ValueError(f"layers must be one contiguous range, got {wanted}")
        self.layout.layer_range(wanted.start, wanted.stop)
        self._check(keys, targets, len(wanted))
        return self._store._reader.read(self._id, keys, targets, wanted)

    def write(self, keys: Sequence[str], sources: Sequence[Parts]) -> list[bool]:
        """Store each page: True where it is published, or was there already.

        Only misuse raises (`ValueError`: shapes).
        """
        self._check(keys, sources, self.layout.layers)
        store = self._store
        names = [self._name(key) for key in keys]
        found = store._reader.look_up(names)
        store._space.touch([name for name, entry in zip(names, found, strict=True) if entry])
        todo = {
            name: number
            for number, (name, entry) in reversed(list(enumerate(zip(names, found, strict=True))))
            if entry is None
        }
        order = sorted(todo.values())
        written = store._writer.write(
            self._id, [key_bytes(keys[i]) for i in order], [sources[i] for i in order]
        )
        outcome = {names[i]: stored for i, stored in zip(order, written, strict=True)}
        return [outcome.get(name, True) for name in names]

    def forget(self, keys: Sequence[str]) -> None:
        """Drop the records of these keys, where there are any."""
        names = [self._name(key) for key in keys]
        found = zip(names, self._store._reader.look_up(names), strict=True)
        records = [(name, entry) for name, entry in found if entry is not None]
        if records:
            self._store._reader.change_index(lambda: self._store._space.remove(records))

    def _name(self, key: str) -> bytes:
        return entry_key(self._id.digest, key_bytes(key))

    def _check(self, keys: Sequence[str], pages: Sequence[Parts], layers: int) -> None:
        if len(keys) != len(pages):
            raise ValueError(f"{len(keys)} keys but {len(pages)} pages")
        for page in pages:
            self.layout.check(page, layers)


def _reopen_in_child() -> None:
    """After a fork: the child's copies of locks, threads and descriptors are not usable."""
    global _registry_lock
    _registry_lock = threading.Lock()
    for path, store in list(_stores.items()):
        try:
            store._after_fork()
        except Exception as error:
            del _stores[path]
            store._warner.warn("fork", f"{path} can't be used in a forked child: {error}")


os.register_at_fork(after_in_child=_reopen_in_child)
