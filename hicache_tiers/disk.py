"""The disk tier: pages as checksummed records in segment files, found by an index."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from hicache_tiers import maintenance
from hicache_tiers.config import NO_CAP, StoreConfig
from hicache_tiers.directory import Directory
from hicache_tiers.errors import StoreError
from hicache_tiers.index import Index
from hicache_tiers.layout import Parts, RecordLayout
from hicache_tiers.reader import Reader
from hicache_tiers.record import NamespaceId, entry_key, key_bytes
from hicache_tiers.resources import Resources
from hicache_tiers.stats import GcReport, NamespaceInfo, TierStats, Usage, VerifyReport
from hicache_tiers.syscalls import Syscalls
from hicache_tiers.warn import logger
from hicache_tiers.writer import Writer

_registry_lock = threading.Lock()
_stores: dict[str, DiskStore] = {}
"""Stores open in this process, by real path of their directory."""


class _Opened:
    """What one process has open, with its two halves."""

    def __init__(self, config: StoreConfig, calls: Syscalls, create: bool) -> None:
        self.resources = Resources(config, calls, create)
        self.reader = Reader(self.resources)
        self.writer = Writer(self.resources)

    def close(self) -> None:
        deadline = self.resources.deadline()
        self.writer.seal(deadline)
        self.resources.close(deadline)

    def drop_inherited(self) -> bool:
        self.writer.drop_inherited()
        return self.resources.drop_inherited()


class DiskStore:
    """A directory of KV pages, shared by any number of threads, processes and ranks.

    A write becomes visible by one index commit, after its bytes are in the segment file; a read
    is the right bytes or a miss. Neither raises for I/O trouble, and neither takes longer than
    the configured deadline: what has not landed by then is a miss, or not stored. In a forked
    child the store is open too: the child becomes a user of its own with its first call. After
    `close` all reads miss and all writes are refused.
    """

    def __init__(self, config: StoreConfig, calls: Syscalls, create: bool) -> None:
        """Use `open` or `open_existing`."""
        self.config = config
        self._calls = calls
        self._opens = 1
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._forked = False
        self._start(create)

    @classmethod
    def open(cls, config: StoreConfig, calls: Syscalls | None = None) -> Self:
        """Open the directory, made if it is missing.

        Nothing is evicted by that: a cap below what is there holds from the first write on.
        One store per directory and process, reference-counted: a second open returns the same
        one, each open needs its `close`. `StoreError` where the directory can't be used, or is
        open in this process with other settings. `calls` is for tests that inject faults.
        """
        return cls._open(config, calls or Syscalls(), create=True)

    @classmethod
    def check(cls, config: StoreConfig) -> None:
        """`StoreError` where `open` would refuse the directory, which is made if it is missing.

        That is: a file in its place, no permission, another format, an unreadable one. What is
        stored stays as it is: nothing is evicted, swept or repaired, no limit is changed. Damage
        of the index is no reason: `open` rebuilds it.
        """
        Directory(config, create=True).check()

    @classmethod
    def open_existing(cls, directory: Path) -> Self:
        """Open a store to look after it, without a cap.

        `StoreError` where there is none.
        """
        config = StoreConfig(directory=directory, capacity_bytes=NO_CAP)
        return cls._open(config, Syscalls(), create=False)

    @classmethod
    def _open(cls, config: StoreConfig, calls: Syscalls, create: bool) -> Self:
        with _registry_lock:
            path = os.path.realpath(config.directory)
            store = _stores.get(path)
            if store is None:
                opened = cls(config, calls, create)
                _stores[path] = opened
                return opened
            if store.config != config:
                raise StoreError(
                    f"{config.directory} is open in this process with other settings "
                    f"({store.config}); use the same everywhere"
                )
            store._opens += 1
            assert isinstance(store, cls)
            return store

    def close(self) -> None:
        """Give back this open; the last one seals the segment and closes the index."""
        with _registry_lock:
            if not self._opens:
                return
            self._opens -= 1
            if self._opens:
                return
            _stores.pop(os.path.realpath(self.config.directory), None)
        with self._lock:
            opened, self._opened, self._forked = self._opened, None, False
        if opened is not None:
            opened.close()

    def _start(self, create: bool) -> None:
        opened = _Opened(self.config, self._calls, create)
        self._counters = opened.resources.counters
        self._opened = opened

    def _now(self) -> _Opened | None:
        """What this process has open; None once closed."""
        if self._forked:
            with self._lock:
                if self._forked:
                    self._forked = False
                    try:
                        self._start(create=True)
                    except StoreError as error:
                        logger.warning("no store in a forked child: %s", error)
        return self._opened

    def _open_now(self) -> _Opened:
        opened = self._now()
        if opened is None:
            raise StoreError(f"the store {self.config.directory} is closed; open it again")
        return opened

    def _after_fork_in_child(self) -> None:
        """Let go of what is the parent's; the next call opens the store for this process."""
        self._lock = threading.Lock()
        opened, self._opened = self._opened, None
        if opened is not None:
            self._forked = opened.drop_inherited()

    def namespace(self, identity: Mapping[str, str | int], layout: RecordLayout) -> Namespace:
        """The records of one identity: model fingerprint, dtype, page size, shard and the like.

        Identity, layout and format version are hashed together; anything that differs is another
        namespace. `StoreError` for an identity that isn't text and whole numbers.
        """
        return Namespace(self, NamespaceId.of(identity, layout))

    def clear(self) -> None:
        """Drop every record of the directory, all namespaces.

        `StoreError` if that failed, or is not done within the deadline; it may then be done later.
        """
        opened = self._open_now()
        deadline = opened.resources.deadline()
        opened.writer.seal(deadline)
        with maintenance.said_plainly(f"{self.config.directory} could not be cleared"):
            opened.resources.index_thread.call(opened.resources.space.clear, deadline)

    def stats(self) -> TierStats:
        """Counters of this process."""
        self._now()
        return self._counters.snapshot()

    def usage(self) -> Usage:
        """What the directory holds now, over all processes. `StoreError` if it can't be read."""
        return maintenance.usage(self._open_now().resources)

    def namespaces(self) -> list[NamespaceInfo]:
        """The namespaces, newest access first. `StoreError` if the index can't be read."""
        return maintenance.namespaces(self._open_now().resources)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read every record and check header and every layer; nothing is changed.

        `progress` is called with (records done, records in all). `StoreError` if the index can't
        be read.
        """
        return maintenance.verify(self._open_now().resources, progress)

    def gc(self, capacity_bytes: int | None = None) -> GcReport:
        """Sweep dead owners' leftovers, drop what is unreachable, apply a cap.

        The cap is this store's unless `capacity_bytes` gives another one for this once. Waits for
        other processes without a limit: for tools. `StoreError` where the index can't be changed.
        """
        opened = self._open_now()
        opened.writer.seal(opened.resources.deadline())
        return maintenance.collect(opened.resources, capacity_bytes or self.config.capacity_bytes)

    def check_integrity(self) -> None:
        """`IntegrityError` where index and segments contradict each other; for quiet moments."""
        maintenance.check_integrity(self._open_now().resources)


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
        """Whether each key has a record now. One index look-up a key, no disk access.

        Absent ones count as misses: who asks here does not go on to read them.
        """
        opened = self._store._now()
        if opened is None:
            return [False] * len(keys)
        found = opened.reader.look_up([self._name(key) for key in keys])
        opened.resources.counters.add(misses=found.count(None))
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
        opened = self._store._now()
        if opened is None:
            return [False] * len(keys)
        deadline = opened.resources.deadline()
        return opened.reader.read(self._id, keys, targets, wanted, deadline)

    def write(self, keys: Sequence[str], sources: Sequence[Parts]) -> list[bool]:
        """Store each page: True where it is published, or was there already.

        Only misuse raises (`ValueError`: shapes).
        """
        self._check(keys, sources, self.layout.layers)
        opened = self._store._now()
        if opened is None:
            return [False] * len(keys)
        deadline = opened.resources.deadline()
        names = [self._name(key) for key in keys]
        found = opened.reader.look_up(names)
        opened.resources.touch([n for n, entry in zip(names, found, strict=True) if entry])
        missing: dict[bytes, int] = {}  # a key given twice is stored once
        for number, (name, entry) in enumerate(zip(names, found, strict=True)):
            if entry is None:
                missing.setdefault(name, number)
        todo = list(missing.values())
        raw_keys = [key_bytes(keys[number]) for number in todo]
        pages = [sources[number] for number in todo]
        stored = opened.writer.write(self._id, raw_keys, pages, deadline)
        outcome = dict(zip(missing, stored, strict=True))
        return [outcome.get(name, True) for name in names]

    def forget(self, keys: Sequence[str]) -> None:
        """Drop the records of these keys, where there are any."""
        opened = self._store._now()
        if opened is None:
            return
        names = [self._name(key) for key in keys]
        found = zip(names, opened.reader.look_up(names), strict=True)
        records = [(name, entry) for name, entry in found if entry is not None]
        if records:
            resources = opened.resources
            resources.change_index(lambda: resources.space.remove(records), resources.deadline())

    def clear(self) -> None:
        """Drop every record of this namespace only.

        `StoreError` if that failed, or is not done within the deadline; it may then be done later.
        """
        opened = self._store._now()
        if opened is None:
            return
        resources = opened.resources
        with maintenance.said_plainly(f"namespace {self.id} could not be cleared"):
            resources.index_thread.call(
                lambda: resources.space.clear_namespace(self._id.digest), resources.deadline()
            )

    def _name(self, key: str) -> bytes:
        return entry_key(self._id.digest, key_bytes(key))

    def _check(self, keys: Sequence[str], pages: Sequence[Parts], layers: int) -> None:
        if len(keys) != len(pages):
            raise ValueError(f"{len(keys)} keys but {len(pages)} pages")
        for page in pages:
            self.layout.check(page, layers)


_quieted: list[Index] = []


def _before_fork() -> None:
    _registry_lock.acquire()
    opened = [store._opened for store in _stores.values() if store._opened is not None]
    _quieted[:] = [each.resources.index for each in opened]
    for index in _quieted:
        index.before_fork()


def _after_fork_in_parent() -> None:
    for index in _quieted:
        index.after_fork_in_parent()
    _quieted.clear()
    _registry_lock.release()


def _after_fork_in_child() -> None:
    """The child's copies of locks, threads and descriptors are not usable."""
    global _registry_lock
    _registry_lock = threading.Lock()
    _quieted.clear()
    for store in _stores.values():
        store._after_fork_in_child()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
