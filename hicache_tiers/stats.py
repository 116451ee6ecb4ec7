"""What a tier counts and reports."""

from __future__ import annotations

import threading

import msgspec


class ErrorCounts(msgspec.Struct):
    """Failed records by kind."""

    read: int = 0
    """The operating system refused the read (EIO, EACCES, a missing segment file, ...)."""
    write: int = 0
    """The operating system or the index refused the write (ENOSPC, EIO, EROFS, ...)."""
    corrupt: int = 0
    """Bytes came back but were not the ones stored."""
    timeout: int = 0
    """The deadline passed, or all I/O threads were hung already."""


class TierStats(msgspec.Struct):
    """Counters of this process since the store was opened; they only grow."""

    hits: int = 0
    """Records read back whole and verified."""
    misses: int = 0
    """Records asked for and not there: absent when looked for (`Namespace.contains`), or not
    delivered by a read, for whatever reason."""
    read_bytes: int = 0
    """Payload bytes delivered by hits."""
    written_records: int = 0
    written_bytes: int = 0
    """Payload bytes published."""
    declined: int = 0
    """Writes refused for want of room: larger than the cap, index full, all room in use."""
    evicted: int = 0
    """Records this process removed to make room."""
    evicted_bytes: int = 0
    """Disk bytes of those records."""
    errors: ErrorCounts = msgspec.field(default_factory=ErrorCounts)


class Usage(msgspec.Struct, frozen=True):
    """What the directory holds now, over all processes."""

    used_bytes: int
    """Bytes charged against the cap: whole active segments, live extents of sealed ones."""
    capacity_bytes: int
    records: int
    namespaces: int
    segments: int
    index_bytes: int
    """Size of the index file; it stays below `index_limit_bytes` and outside the cap."""
    index_limit_bytes: int


class NamespaceInfo(msgspec.Struct, frozen=True):
    """One namespace of the directory, for ``cacheflow store ls``."""

    id: str
    """32 hex digits."""
    identity: dict[str, str | int]
    layers: int
    part_bytes: tuple[int, ...]
    records: int
    disk_bytes: int
    newest_access: float | None
    """Seconds since the epoch; None without records."""


class Damage(msgspec.Struct, frozen=True):
    """A record that doesn't read back."""

    namespace: str
    key: str
    """The key, or its digest where the header is damaged too."""
    why: str


class VerifyReport(msgspec.Struct, frozen=True):
    """Outcome of reading every record."""

    records: int
    payload_bytes: int
    damaged: tuple[Damage, ...]


class GcReport(msgspec.Struct, frozen=True):
    """What a collection removed or mended."""

    sealed_segments: int
    """Segments of dead processes closed and cut to what they had published."""
    stray_files: int
    """Segment files the index doesn't know, removed."""
    lost_records: int
    """Index entries removed because their segment file is gone or of another format."""
    evicted_records: int
    """Records removed to get below the cap."""
    freed_bytes: int
    """Charged bytes given back, all together."""


class Counters:
    """The `TierStats` of a store, safe to add to from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = TierStats()

    def add(self, **amounts: int) -> None:
        """Add to fields of `TierStats`, for example ``add(hits=3)``."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._stats, name, getattr(self._stats, name) + amount)

    def error(self, kind: str, records: int = 1) -> None:
        """Count failed records under a field of `ErrorCounts`."""
        with self._lock:
            errors = self._stats.errors
            setattr(errors, kind, getattr(errors, kind) + records)

    def snapshot(self) -> TierStats:
        """A copy that no longer changes."""
        with self._lock:
            errors = msgspec.structs.replace(self._stats.errors)
            return msgspec.structs.replace(self._stats, errors=errors)
