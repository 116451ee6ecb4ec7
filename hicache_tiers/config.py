"""Settings of a disk store."""

from __future__ import annotations

from pathlib import Path

import msgspec

BLOCK = 4096
"""Unit of every offset and length on disk, so that direct I/O can read any record."""

MAX_SEGMENT_BYTES = 256 << 20

NO_CAP = 1 << 62
"""Capacity of a process that only looks after a store."""


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the store lives and how much it may take."""

    directory: Path
    capacity_bytes: int
    """Cap on the segment files of the directory, over all processes and ranks that share it.

    Processes may give different caps; each keeps the directory below its own as it writes.
    """
    segment_bytes: int | None = None
    """Largest segment file; by default a sixteenth of the capacity, at most 256 MiB."""
    io_threads: int = 4
    deadline_s: float = 5.0
    """Seconds that one call may take, however many records it asks for: what has not landed by
    then is a miss, or not stored. A thread that hangs for as long is replaced."""

    def __post_init__(self) -> None:
        """`ValueError` for a value that can't work."""
        if self.capacity_bytes < 1:
            raise ValueError(f"capacity_bytes must be above 0, got {self.capacity_bytes}")
        if self.segment_bytes is not None and self.segment_bytes < 1:
            raise ValueError(f"segment_bytes must be above 0, got {self.segment_bytes}")
        if self.io_threads < 1:
            raise ValueError(f"io_threads must be 1 or more, got {self.io_threads}")
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s must be above 0, got {self.deadline_s}")

    @property
    def segment_limit(self) -> int:
        """Bytes at which a segment is full: a multiple of `BLOCK`."""
        size = self.segment_bytes or min(self.capacity_bytes // 16, MAX_SEGMENT_BYTES)
        return max(round_up(size - BLOCK + 1), BLOCK)


def round_up(size: int) -> int:
    """The next multiple of `BLOCK`."""
    return -(-size // BLOCK) * BLOCK
