"""Segment files: where they lie, who owns one, and the descriptors kept open to read them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from hicache_tiers.syscalls import Syscalls

_PER_DIRECTORY_BITS = 10
_KEPT_OPEN = 64
_LAST_SEGMENT = (1 << 63) - 1


def segment_path(root: Path, segment: int) -> Path:
    """Path of a segment below ``segments/``: 1,024 of them share a directory."""
    return root / f"{segment >> _PER_DIRECTORY_BITS:06x}" / f"{segment:010x}.seg"


def segment_files(root: Path) -> Iterator[tuple[int, Path]]:
    """All segment files and their ids, by a listing; what else lies there is left alone."""
    for path in sorted(root.glob("*/*.seg")):
        with contextlib.suppress(ValueError):
            segment = int(path.stem, 16)
            ours = segment <= _LAST_SEGMENT and segment_path(root, segment) == path
            if ours and path.is_file() and not path.is_symlink():
                yield segment, path


class ActiveSegment:
    """The segment that this process appends to.

    The descriptor holds an exclusive ``flock`` for as long as this process owns the segment: who
    gets that lock knows that the owner is gone. `tail` is the end of what has been handed out;
    only the thread that holds the writer's lock may move it. The descriptor stays open until
    the last holder lets go, which may be a hung thread: a number reused under it would be fatal.
    """

    def __init__(self, segment: int, fd: int, size: int) -> None:
        self.id = segment
        self.fd = fd
        self.size = size
        self.tail = 0

    @property
    def room(self) -> int:
        """Bytes left."""
        return self.size - self.tail

    @property
    def unlinked(self) -> bool:
        """Whether somebody removed the file: what is appended now would be lost."""
        return os.fstat(self.fd).st_nlink == 0

    def release(self) -> None:
        """Give up ownership: anybody may seal the segment now."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def drop_inherited(self) -> None:
        """Close the copy that a forked child got: the parent still owns the segment."""
        fd, self.fd = self.fd, -1
        os.close(fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class SegmentFiles:
    """Opens, creates and removes segment files below one directory."""

    def __init__(self, root: Path, calls: Syscalls) -> None:
        self._root = root
        self._calls = calls
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, _Descriptor] = OrderedDict()

    def path(self, segment: int) -> Path:
        """Where a segment lies."""
        return segment_path(self._root, segment)

    def listed(self) -> Iterator[tuple[int, Path]]:
        """All segment files, by a listing: never on the way of a read or a write."""
        return segment_files(self._root)

    def create(self, segment: int, size: int) -> ActiveSegment | None:
        """A new, empty, owned segment; None if the name is taken. `OSError` if it can't be made.

        A file of that id without an owner is what a killed process left before it could publish
        the id; it is taken over. So ids must be handed out under the index's write lock.
        """
        try:
            active = ActiveSegment(segment, self._open_new(self.path(segment)), size)
        except IsADirectoryError:
            return None
        info = os.fstat(active.fd)
        if not stat.S_ISREG(info.st_mode) or not try_lock(active.fd):
            return None
        if info.st_size:
            self._calls.ftruncate(active.fd, 0)
        return active

    def uncreate(self, active: ActiveSegment) -> None:
        """Take back a segment that could not be entered into the index."""
        with contextlib.suppress(OSError):
            self._calls.unlink(str(self.path(active.id)))
        active.release()

    def _open_new(self, path: Path) -> int:
        while True:
            with contextlib.suppress(FileExistsError):
                path.parent.mkdir(mode=0o700)
            try:
                return self._calls.open(str(path), os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                # Another process removed its last segment and with it the directory.
                if not self._root.exists():
                    raise

    def open_to_change(self, segment: int) -> int:
        """A descriptor of the caller's own, to punch or cut."""
        return self._calls.open(str(self.path(segment)), os.O_RDWR)

    def remove(self, segment: int) -> None:
        """Empty and unlink: other processes' descriptors then hold no space. Gone is fine."""
        self.discard(segment)
        path = self.path(segment)
        try:
            fd = self.open_to_change(segment)
        except FileNotFoundError:
            return
        except PermissionError:
            fd = -1  # can't be opened, but may still be unlinked
        if fd >= 0:
            try:
                self._calls.ftruncate(fd, 0)
            finally:
                os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            self._calls.unlink(str(path))
        with contextlib.suppress(OSError):  # not empty, as a rule
            path.parent.rmdir()

    @contextlib.contextmanager
    def reading(self, segment: int) -> Iterator[int]:
        """A descriptor to read from, kept open for the next reader."""
        descriptor = self._borrow(segment)
        try:
            yield descriptor.fd
        finally:
            with self._lock:
                descriptor.users -= 1
                descriptor.close_if_done()
                self._trim()

    def discard(self, segment: int) -> None:
        """Close the kept descriptor of a segment, once nobody reads from it."""
        with self._lock:
            descriptor = self._kept.pop(segment, None)
            if descriptor is not None:
                descriptor.kept = False
                descriptor.close_if_done()

    def close(self) -> None:
        """Close what is kept open; readers on the way close theirs when they are done."""
        for segment in list(self._kept):
            self.discard(segment)

    def drop_inherited(self) -> None:
        """Close the copies that a forked child got, without the lock: it may be held for ever."""
        for descriptor in self._kept.values():
            os.close(descriptor.fd)

    def _borrow(self, segment: int) -> _Descriptor:
        with self._lock:
            found = self._kept.get(segment)
            if found is not None:
                self._kept.move_to_end(segment)
                found.users += 1
                return found
        # Not under the lock: an open may hang.
        opened = _Descriptor(self._calls.open(str(self.path(segment)), os.O_RDONLY))
        with self._lock:
            if segment in self._kept:
                opened.kept = False  # another thread was faster; this one is closed after use
            else:
                self._kept[segment] = opened
                self._trim()
        return opened

    def _trim(self) -> None:
        """Close what is over the limit, coldest first; called with the lock."""
        surplus = len(self._kept) - _KEPT_OPEN
        if surplus > 0:
            unused = [segment for segment, kept in self._kept.items() if not kept.users]
            for segment in unused[:surplus]:
                os.close(self._kept.pop(segment).fd)


class _Descriptor:
    """An open file and the number of readers on it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 1
        self.kept = True

    def close_if_done(self) -> None:
        if not self.kept and not self.users:
            os.close(self.fd)


def try_lock(fd: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Take a ``flock`` without waiting; False where another process holds it."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
