"""The directory of a store: its layout, its format number, and who may use it.

::

    FORMAT      JSON: format number, limit of the index
    LOCK        flock: shared by every process that has the store open, exclusive to repair it
    index/      lmdb
    segments/   segment files
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hicache_tiers.config import BLOCK, StoreConfig
from hicache_tiers.errors import StoreError
from hicache_tiers.record import FORMAT
from hicache_tiers.segments import try_lock

_LOCK_WAIT_S = 60.0
_INDEX_SHARE = 8
_MIN_INDEX_BYTES, _MAX_INDEX_BYTES = 64 << 20, 64 << 30


class FormatNumber(msgspec.Struct, frozen=True):
    """What ``FORMAT`` holds in every version, past and future."""

    format: int


class FormatFile(FormatNumber, frozen=True):
    """Content of ``FORMAT`` in this version."""

    index_limit_bytes: int
    """All processes map the index with this one size."""
    written_by: str = "hicache_tiers"


class Directory:
    """An open, locked directory of this format."""

    def __init__(self, config: StoreConfig, create: bool) -> None:
        self.root = config.directory
        self.index = self.root / "index"
        self.segments = self.root / "segments"
        self._config = config
        self._create = create
        self._fd = -1

    def enter(self) -> bool:
        """Make what is missing and take the lock; whether this process is alone.

        `StoreError` where that can't be done. Alone means: with the exclusive lock, free to
        repair; `share` then lets others in.
        """
        if not self._create and not (self.root / "FORMAT").is_file():
            raise StoreError(f"{self.root} holds no store; check the path")
        with self._claiming() as alone:
            if alone and self._create:
                self._write_format()
            self.format()
        return alone

    def check(self) -> None:
        """`StoreError` for what `enter` would refuse; the content of a store is left as it is."""
        with self._claiming() as alone:
            if (self.root / "FORMAT").exists() and not alone:
                self.check_index()
            for path in (self.root, self.index, self.segments):
                _check_access(path, os.R_OK | os.W_OK | os.X_OK)
            for path in self.index.glob("*.mdb"):
                _check_access(path, os.R_OK | os.W_OK)
        self.leave()

    @contextlib.contextmanager
    def _claiming(self) -> Iterator[bool]:
        """Make the directories, take the lock, refuse another format; whether we are alone.

        The lock stays unless something is wrong, here or inside: then it is a `StoreError`.
        """
        try:
            _make_directory(self.root)
            self._fd = os.open(self.root / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            alone = self._wait_for_lock(fcntl.LOCK_EX, fcntl.LOCK_SH) == fcntl.LOCK_EX
            if (self.root / "FORMAT").exists():
                self.format()
            for path in (self.index, self.segments):
                _make_directory(path)
            yield alone
        except OSError as error:
            self.leave()
            raise StoreError(
                f"cannot use store directory {self.root}: {error.strerror or error} "
                f"({error.filename or self.root}); give a writable directory on a local disk"
            ) from error
        except BaseException:
            self.leave()
            raise

    def share(self) -> None:
        """Turn the exclusive lock into a shared one."""
        self._wait_for_lock(fcntl.LOCK_SH)

    def check_index(self) -> None:
        """`StoreError` where the index is gone while other processes use it."""
        if not (self.index / "data.mdb").exists():
            raise StoreError(
                f"{self.index} has no index, and other processes use the store; stop them, then "
                "start again: it is rebuilt from the segments"
            )

    def format(self) -> FormatFile:
        """The checked content of ``FORMAT``; `StoreError` for another format."""
        path = self.root / "FORMAT"
        try:
            content = path.read_bytes()
            number = msgspec.json.decode(content, type=FormatNumber).format
            if number == FORMAT:
                return msgspec.json.decode(content, type=FormatFile)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(
                f"{path} is not readable as a store format ({error}); remove the directory or "
                "give another one"
            ) from error
        raise StoreError(
            f"{self.root} is a store of format {number}, this version reads {FORMAT}; "
            "give another directory or remove this one"
        )

    def leave(self) -> None:
        """Give the lock back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_format(self) -> None:
        """Create ``FORMAT``, or raise the limit of the index to what this capacity needs."""
        path = self.root / "FORMAT"
        share = self._config.capacity_bytes // _INDEX_SHARE // BLOCK * BLOCK
        limit = min(max(share, _MIN_INDEX_BYTES), _MAX_INDEX_BYTES)
        if path.exists() and self.format().index_limit_bytes >= limit:
            return
        fresh = path.with_name("FORMAT.new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(FormatFile(FORMAT, limit)))
        fresh.replace(path)

    def _wait_for_lock(self, *wanted: int) -> int:
        """Take the first of these locks to be had; another process may be repairing.

        Who wants both tries the exclusive one first, every time: the one that repairs may die.
        """
        give_up = time.monotonic() + _LOCK_WAIT_S
        while True:
            for operation in wanted:
                if try_lock(self._fd, operation):
                    return operation
            if time.monotonic() > give_up:
                raise StoreError(
                    f"{self.root} is being repaired by another process for over "
                    f"{_LOCK_WAIT_S:g} s; wait for it to end, then start again"
                )
            time.sleep(0.02)


def _check_access(path: Path, wanted: int) -> None:
    if not os.access(path, wanted):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _make_directory(path: Path) -> None:
    """Make a directory and its parents, closed to others whatever the umask is."""
    if path.is_dir():
        return
    if path.parent != path:
        _make_directory(path.parent)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(
                errno.ENOTDIR, "it is a file, not a directory", str(path)
            ) from None
