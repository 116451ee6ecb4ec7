"""The index of a directory: one lmdb environment a process, opened, guarded and closed here.

All tables change in one transaction, so that a killed process leaves either all of a publication
or nothing.

lmdb reads its file through a memory map, and that sets two limits. A look-up that must fetch a
page of the index from a disk that hangs waits for the disk: look-ups have no deadline, unlike
changes, which run on a thread that callers can give up. And where the disk fails to deliver the
page, or somebody cuts the file under a running process, the process is killed (SIGBUS); damage
that is there before an open is found by `why_damaged`. The index is about a hundredth of the
pages and its inner pages are always in use, so the page cache holds it, as a rule.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import msgspec
from lmdb.verify import VerifyError, verify

from hicache_tiers.config import BLOCK
from hicache_tiers.tables import TABLES, IndexBrokenError, Txn

_READERS = 512
_FORK_WAIT_S = 5.0
_DATA = "data.mdb"
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)
_STALE = (lmdb.PanicError, lmdb.BadTxnError)


class IndexLimitError(Exception):
    """The index has reached its size limit."""


class Index:
    """The environment of this process. Transactions may run in any thread; close waits for them.

    `IndexBrokenError` and `IndexLimitError` stand for everything that lmdb may raise.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._users = 0
        self._closed = False
        self._then: Callable[[], None] = lambda: None
        self._stale = False
        self._quiet = False
        self._env, self._tables = self._open()
        self._file = self._file_there()

    def _open(self) -> tuple[lmdb.Environment, dict[str, lmdb._Database]]:
        try:
            _reserve_lock_file(self._directory)
            env = lmdb.open(
                str(self._directory),
                map_size=self._limit_bytes,
                max_dbs=len(TABLES),
                max_readers=_READERS,
                mode=0o600,
                metasync=False,  # the last commits may be lost with the power, not the structure
                readahead=False,
            )
        except (lmdb.Error, OSError) as error:
            raise IndexBrokenError(str(error)) from error
        try:
            return env, {name: env.open_db(name.encode()) for name in TABLES}
        except lmdb.Error as error:
            env.close()
            raise IndexBrokenError(str(error)) from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[Txn]:
        """A consistent view; keep it short, it holds old pages of the index in place."""
        with self._transaction(write=False) as txn:
            yield txn

    @contextlib.contextmanager
    def writing(self) -> Iterator[Txn]:
        """Change the tables: committed at the end, undone by an exception.

        Waits for other writers, of all processes, without a limit: call it where waiting is fine.
        """
        if self._file_there() != self._file:  # what is there now belongs to somebody else
            raise IndexBrokenError(
                f"{self._directory} was removed or replaced while in use; restart this process"
            )
        with self._transaction(write=True) as txn:
            yield txn

    @contextlib.contextmanager
    def _transaction(self, write: bool) -> Iterator[Txn]:
        with self._changed:
            if self._closed:
                raise IndexBrokenError("the store is closed")
            if self._stale and not self._users:
                self._reopen()
            self._users += 1
        try:
            with self._env.begin(write=write) as txn:
                yield Txn(txn, self._tables)
        except lmdb.MapFullError as error:
            raise IndexLimitError(str(error)) from error
        except lmdb.Error as error:
            if isinstance(error, _DAMAGE):
                mark_damaged(self._directory)
            self._stale = self._stale or isinstance(error, _STALE)
            raise IndexBrokenError(str(error)) from error
        except IndexBrokenError:
            mark_damaged(self._directory)  # rows that contradict each other
            raise
        except (msgspec.DecodeError, struct.error) as error:
            mark_damaged(self._directory)
            raise IndexBrokenError(f"unreadable row: {error}") from error
        finally:
            with self._changed:
                self._users -= 1
                if self._closed and not self._users:
                    self._end()
                self._changed.notify_all()

    def _reopen(self) -> None:
        """Replace an environment that a failed commit left unusable; called with the lock."""
        self._env.close()
        self._env, self._tables = self._open()
        self._stale = False

    def _file_there(self) -> tuple[int, int] | None:
        """Which file has the index's name now."""
        try:
            info = (self._directory / _DATA).stat()
        except OSError:
            return None
        return info.st_dev, info.st_ino

    def free_dead_readers(self) -> None:
        """Release the views that killed processes held, so that their pages are used again."""
        with self.reading():
            self._env.reader_check()

    def file_bytes(self) -> int:
        """Size of the index file."""
        return (self._directory / _DATA).stat().st_size

    @property
    def limit_bytes(self) -> int:
        """Most the index file may grow to."""
        return self._limit_bytes

    def close(self, timeout_s: float, then: Callable[[], None] = lambda: None) -> None:
        """Close, then call `then`.

        Closing under a transaction would crash: one that still hangs after `timeout_s` does both
        when it ends.
        """
        with self._changed:
            self._closed = True
            self._then = then
            if not self._users:
                self._end()
            self._changed.wait_for(lambda: not self._users, timeout_s)

    def _end(self) -> None:
        self._env.close()
        self._then()

    def before_fork(self) -> None:
        """Let no transaction be under way during a fork.

        A child that closes its copy of an environment also ends the transactions in it, and with
        them the parent's: so there must be none. A commit that hangs is not waited for.
        """
        self._changed.acquire()
        self._quiet = self._changed.wait_for(lambda: not self._users, _FORK_WAIT_S)

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._changed.release()

    def drop_inherited(self) -> bool:
        """Close the child's copy of the environment; False where that is not safe."""
        if self._quiet:
            self._env.close()
        return self._quiet


_DAMAGED = "DAMAGED"
_META = struct.Struct("<16xIIQQ")  # page header; magic, version, address, map size
_LMDB_MAGIC, _LMDB_VERSION = 0xBEEFC0DE, 1
_WALKED_BYTES = 32 << 20
_PAGE_SIZE_AT, _LAST_PAGE_AT = 40, 136


def mark_damaged(directory: Path) -> None:
    """Have the next process that is alone here rebuild the index."""
    with contextlib.suppress(OSError):
        os.close(os.open(directory / _DAMAGED, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def mark_whole(directory: Path) -> None:
    """Take back `mark_damaged`."""
    (directory / _DAMAGED).unlink(missing_ok=True)


def why_damaged(directory: Path) -> str | None:
    """What is wrong with the index at rest, as far as can be told without lmdb.

    lmdb trusts its file: a page beyond the end kills the process (SIGBUS), and so may a page of
    zeros (an assertion). So the length is compared with the meta pages, and an index that is
    small enough is walked page by page (about 46 MB/s).
    """
    if (directory / _DAMAGED).exists():
        return "it was found damaged by an earlier run"
    try:
        with (directory / _DATA).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            pages = [file.read(BLOCK)]
            page_size = int.from_bytes(pages[0][_PAGE_SIZE_AT : _PAGE_SIZE_AT + 4], "little")
            if not 512 <= page_size <= 65536:
                return "its first page is garbage"
            file.seek(page_size)
            pages.append(file.read(BLOCK))
    except FileNotFoundError:
        return "its data file is missing"
    except OSError as error:
        return str(error)
    ends = []
    for page in pages:
        if len(page) < _LAST_PAGE_AT + 16:
            return "it is cut short"
        magic, version, _, _ = _META.unpack_from(page)
        if magic != _LMDB_MAGIC:
            return "a meta page is garbage"
        if version != _LMDB_VERSION:
            return None  # another generation of lmdb, which checks for itself
        last_page, transaction = struct.unpack_from("<QQ", page, _LAST_PAGE_AT)
        ends.append((transaction, (last_page + 1) * page_size))
    if size < max(ends)[1]:
        return "it is cut short"
    return _why_unsound(directory) if size <= _WALKED_BYTES else None


def _why_unsound(directory: Path) -> str | None:
    try:
        faults = verify(str(directory))
    except (VerifyError, OSError) as error:
        return str(error)
    return faults[0] if faults else None


def new_index(directory: Path, limit_bytes: int) -> Index:
    """An empty index in place of whatever is there; only for a process that is alone.

    It counts as damaged until `mark_whole`: its maker may be killed before it is filled.
    """
    mark_damaged(directory)
    for name in (_DATA, "lock.mdb"):
        (directory / name).unlink(missing_ok=True)
    return Index(directory, limit_bytes)


def _reserve_lock_file(directory: Path) -> None:
    """Give lmdb's lock file its disk blocks before lmdb maps it.

    It is written through the map: on a full disk the first use of a reader's slot would kill the
    process (SIGBUS). lmdb takes the number of slots from the size. Only while this process has
    the environment closed, because closing a file drops the process's POSIX locks on it.
    """
    fd = os.open(directory / "lock.mdb", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, 64 * _READERS + BLOCK)
    finally:
        os.close(fd)
