"""The few system calls of the store, in one object that tests replace to inject faults."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


class Syscalls:
    """Thin: each method is one system call. All raise `OSError`; Python restarts on EINTR."""

    def open(self, path: str, flags: int) -> int:
        """Open or create a file that only the owner may touch."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read into `buffer`; may be short."""
        return os.preadv(fd, [buffer], offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write `buffer`; may be short."""
        return os.pwrite(fd, buffer, offset)

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Give the blocks of a range back to the file system; it reads as zeros."""
        length64 = ctypes.c_int64(length)
        if _libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(offset), length64) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def ftruncate(self, fd: int, length: int) -> None:
        """Cut or extend a file."""
        os.ftruncate(fd, length)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        Path(path).unlink()


def read_fully(calls: Syscalls, fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset`; bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(buffer):
        count = calls.pread(fd, buffer[done:], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_fully(calls: Syscalls, fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of `buffer` at `offset`."""
    done = 0
    while done < len(buffer):
        count = calls.pwrite(fd, buffer[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file system accepted no bytes")
        done += count


def punch_unsupported(error: OSError) -> bool:
    """Whether the file system can't punch holes at all."""
    return error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
