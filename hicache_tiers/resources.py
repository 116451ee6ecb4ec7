"""What one process has open of a disk store: descriptors, threads, locks, the index."""

from __future__ import annotations

from collections.abc import Callable

from hicache_tiers.config import StoreConfig
from hicache_tiers.directory import Directory
from hicache_tiers.errors import StoreError
from hicache_tiers.index import Index, IndexLimitError, why_damaged
from hicache_tiers.io_pool import Buffers, Deadline, HungError, IoPool, Job
from hicache_tiers.rebuild import rebuild
from hicache_tiers.segments import SegmentFiles
from hicache_tiers.space import Space
from hicache_tiers.stats import Counters
from hicache_tiers.syscalls import Syscalls
from hicache_tiers.tables import Entry, IndexBrokenError
from hicache_tiers.warn import Warner

INDEX_TROUBLE = (HungError, IndexBrokenError, IndexLimitError, OSError)
"""What a change of the index may end in."""


class Resources:
    """All of it, built in order; a forked child builds its own."""

    def __init__(self, config: StoreConfig, calls: Syscalls, create: bool) -> None:
        self.config = config
        self.calls = calls
        self.counters = Counters()
        self.warner = Warner()
        self.directory = Directory(config, create)
        alone = self.directory.enter()
        try:
            if alone:
                self._repair()
                self.directory.share()
            self.directory.check_index()
            limit = self.directory.format().index_limit_bytes
            self.index = Index(self.directory.index, limit)
        except (IndexBrokenError, OSError) as error:
            self.directory.leave()
            raise StoreError(
                f"cannot open the index of {config.directory}: {error}; check the space and the "
                "permissions there"
            ) from error
        except BaseException:
            self.directory.leave()
            raise
        self.files = SegmentFiles(self.directory.segments, calls)
        self.space = Space(config, self.index, self.files, calls, self.counters, self.warner)
        self.pool = IoPool("store-io", config.io_threads, config.deadline_s)
        # One thread: lmdb has one writer at a time, and a hung commit must not take the readers'.
        self.index_thread = IoPool("store-index", 1, config.deadline_s)
        self.buffers = Buffers(spare=2 * config.io_threads)
        self._flush: Job[None] | None = None
        self.change_index(self.space.tidy, self.deadline())

    def _repair(self) -> None:
        """Make the index usable, being alone in the directory."""
        limit = self.directory.format().index_limit_bytes
        if why_damaged(self.directory.index) is None:
            try:
                index = Index(self.directory.index, limit)
                with index.writing() as txn:
                    txn.recompute_used()
                index.close(timeout_s=0.0)
                return
            except IndexBrokenError:
                pass  # what is there can't be read: the segments have it all
        rebuild(self.directory.index, limit, self.directory.segments)

    def deadline(self) -> Deadline:
        """The one of a call that begins now."""
        return Deadline(self.config.deadline_s)

    def change_index(self, change: Callable[[], object], deadline: Deadline) -> bool:
        """Make a change of the index on its thread; False, with a warning, where it failed."""
        try:
            self.index_thread.call(change, deadline)
        except INDEX_TROUBLE as error:
            self.warner.warn("index", f"{self.config.directory}: index not changed: {error}")
            return False
        return True

    def look_up(self, names: list[bytes]) -> list[Entry | None]:
        """The entry of each entry key; all None where the index can't be read."""
        try:
            with self.index.reading() as txn:
                return [txn.entry(name) for name in names]
        except (IndexBrokenError, IndexLimitError) as error:
            self.warner.warn("index", f"{self.config.directory}: look-up failed: {error}")
            return [None] * len(names)

    def touch(self, names: list[bytes]) -> None:
        """Note accesses, and write them to the index now and then."""
        due = self.space.touch(names)
        if due and (self._flush is None or self._flush.finished):  # one waits at a time
            self._flush = self.index_thread.submit(self.space.write_touches)

    def close(self, deadline: Deadline) -> None:
        """Write what is noted, end the threads, give everything back."""
        self.change_index(self.space.write_touches, deadline)
        self.pool.close(deadline)
        self.index_thread.close(deadline)
        self.files.close()
        # The lock goes last: while a commit hangs, nobody may take the directory for unused.
        self.index.close(deadline.left, then=self.directory.leave)

    def drop_inherited(self) -> bool:
        """In a forked child: close the copies of what is the parent's, and touch nothing else.

        False where the child can't open the store for itself.
        """
        self.files.drop_inherited()
        self.directory.leave()
        return self.index.drop_inherited()
