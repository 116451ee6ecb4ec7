"""Tables of the index: which record lies where, who used it last, what every segment costs.

Rows are msgpack; integers in keys are big-endian, so that they sort::

    entries     namespace 16 | key digest 16  ->  Entry
    lru         access stamp 8 | entry key 32 ->  nothing; ordered, coldest first
    extents     segment 8 | offset 8          ->  entry key of the record there
    pending     segment 8 | offset 8          ->  length of an extent to give back to the disk
    segments    segment 8                     ->  Segment
    active      segment 8                     ->  process that appends to it, for people
    namespaces  digest 16                     ->  NamespaceRow
    meta        used, next_segment            ->  integer 8
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import lmdb
import msgspec

from hicache_tiers.config import BLOCK
from hicache_tiers.record import NamespaceId

TABLES = ("entries", "lru", "extents", "pending", "segments", "active", "namespaces", "meta")
_U64 = struct.Struct(">Q")
_PLACE = struct.Struct(">QQ")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Place of a record, and what a read is checked against."""

    format: int
    segment: int
    offset: int
    header_bytes: int
    extent_bytes: int
    stamp: int
    """Last access, microseconds since the epoch."""
    checksums: bytes
    """Little-endian xxh3_64 of each layer."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """State of a segment file."""

    active: bool
    size: int
    """Bytes reserved while active; length of the file once sealed."""
    live_bytes: int = 0
    live_records: int = 0
    pending_bytes: int = 0
    """Bytes of extents that hold no record any more but may still hold disk blocks."""

    @property
    def charge(self) -> int:
        """Bytes this segment counts against the cap, never less than it takes on disk.

        The extra blocks are for the file system's own map of the file, which grows with holes.
        """
        if self.active:
            return self.size + BLOCK * (1 + (self.size >> 20))
        return self.live_bytes + self.pending_bytes + BLOCK * (1 + self.live_records // 128)

    @property
    def empty(self) -> bool:
        """Sealed and without a record: the file can go."""
        return not self.active and not self.live_records


class NamespaceRow(msgspec.Struct, frozen=True, array_like=True):
    """What a namespace is, for people."""

    identity: str
    layers: int
    part_bytes: tuple[int, ...]


class IndexBrokenError(Exception):
    """The index can't be read or written now; the message says why."""


_encode = msgspec.msgpack.Encoder().encode
_entry = msgspec.msgpack.Decoder(Entry).decode
_segment = msgspec.msgpack.Decoder(Segment).decode
_namespace = msgspec.msgpack.Decoder(NamespaceRow).decode


class Txn:
    """The tables within one transaction. Every change keeps all of them consistent."""

    def __init__(self, txn: lmdb.Transaction[bytes], tables: dict[str, lmdb._Database]) -> None:
        self._txn = txn
        self._tables = tables

    # Reading

    def entry(self, name: bytes) -> Entry | None:
        """The record of an entry key."""
        raw = self._txn.get(name, db=self._tables["entries"])
        return None if raw is None else _entry(raw)

    def entries(self, digest: bytes = b"") -> Iterator[tuple[bytes, Entry]]:
        """All records, by namespace; or those of the namespace with this digest."""
        with self._txn.cursor(self._tables["entries"]) as cursor:
            if not cursor.set_range(digest):
                return
            for name, raw in cursor:
                if not name.startswith(digest):
                    return
                yield name, _entry(raw)

    def coldest(self) -> Iterator[bytes]:
        """Entry keys, least recently used first."""
        with self._txn.cursor(self._tables["lru"]) as cursor:
            for stamped in cursor.iternext(values=False):
                yield stamped[_U64.size :]

    def stamps(self) -> dict[bytes, int]:
        """Access stamp of each entry key, as the table that orders them has it."""
        with self._txn.cursor(self._tables["lru"]) as cursor:
            keys = cursor.iternext(values=False)
            return {key[_U64.size :]: _U64.unpack_from(key)[0] for key in keys}

    def newest_stamp(self) -> int:
        """The latest access stamp; 0 without records."""
        with self._txn.cursor(self._tables["lru"]) as cursor:
            return int(_U64.unpack_from(cursor.key())[0]) if cursor.last() else 0

    def segment(self, segment: int) -> Segment | None:
        """State of a segment."""
        raw = self._txn.get(_U64.pack(segment), db=self._tables["segments"])
        return None if raw is None else _segment(raw)

    def segments(self) -> Iterator[tuple[int, Segment]]:
        """All segments."""
        with self._txn.cursor(self._tables["segments"]) as cursor:
            for key, raw in cursor:
                yield _U64.unpack(key)[0], _segment(raw)

    def active(self) -> list[int]:
        """Segments that somebody appends to, or did when it died."""
        with self._txn.cursor(self._tables["active"]) as cursor:
            return [_U64.unpack(key)[0] for key in cursor.iternext(values=False)]

    def extents(self, segment: int) -> list[tuple[int, bytes]]:
        """Offset and entry key of each record of a segment, in order."""
        return [(place[1], name) for place, name in self._places("extents", segment)]

    def pending(self, segment: int | None = None) -> Iterator[tuple[int, int, int]]:
        """(segment, offset, length) of each extent to give back."""
        for (number, offset), raw in self._places("pending", segment):
            yield number, offset, _U64.unpack(raw)[0]

    def namespaces(self) -> dict[bytes, NamespaceRow]:
        """All namespaces by digest."""
        with self._txn.cursor(self._tables["namespaces"]) as cursor:
            return {digest: _namespace(raw) for digest, raw in cursor}

    def published_end(self, segment: int) -> int:
        """End of the last extent that the index knows in a segment."""
        ends = [offset + length for _, offset, length in self.pending(segment)]
        for offset, name in self.extents(segment)[-1:]:
            entry = self.entry(name)
            ends.append(offset + entry.extent_bytes if entry else offset)
        return max(ends, default=0)

    def used(self) -> int:
        """Sum of the charges of all segments."""
        return self._number(b"used")

    def next_segment(self) -> int:
        """The id that the next segment gets."""
        return self._number(b"next_segment")

    def count(self, table: str) -> int:
        """Rows of a table."""
        return int(self._txn.stat(self._tables[table])["entries"])

    # Changing

    def add(self, name: bytes, entry: Entry) -> None:
        """Publish a record under an entry key that has none."""
        segment = self._known(entry.segment)
        self._put("entries", name, _encode(entry))
        self._put("lru", _U64.pack(entry.stamp) + name, b"")
        self._put("extents", _PLACE.pack(entry.segment, entry.offset), name)
        self.put_segment(
            entry.segment,
            msgspec.structs.replace(
                segment,
                live_bytes=segment.live_bytes + entry.extent_bytes,
                live_records=segment.live_records + 1,
            ),
        )

    def remove(self, name: bytes, entry: Entry) -> None:
        """Drop a record; its extent stays charged until `settle`."""
        self._unlist(name, entry)
        segment = self._known(entry.segment)
        segment = msgspec.structs.replace(
            segment,
            live_bytes=segment.live_bytes - entry.extent_bytes,
            live_records=segment.live_records - 1,
        )
        self.put_segment(entry.segment, segment)
        self.add_pending(entry.segment, entry.offset, entry.extent_bytes)

    def touch(self, name: bytes, stamp: int) -> None:
        """Note an access, unless a later one is known."""
        entry = self.entry(name)
        if entry is None or entry.stamp >= stamp:
            return
        self._delete("lru", _U64.pack(entry.stamp) + name)
        self._put("lru", _U64.pack(stamp) + name, b"")
        self._put("entries", name, _encode(msgspec.structs.replace(entry, stamp=stamp)))

    def add_pending(self, segment: int, offset: int, length: int) -> None:
        """Note an extent that holds no record but may hold disk blocks."""
        state = self._known(segment)
        self._put("pending", _PLACE.pack(segment, offset), _U64.pack(length))
        pending = state.pending_bytes + length
        self.put_segment(segment, msgspec.structs.replace(state, pending_bytes=pending))

    def settle(self, segment: int, offset: int, length: int) -> None:
        """Credit a pending extent whose blocks are back, unless another process did.

        An extent of another length is not the one that was freed: `clear` came in between.
        """
        key = _PLACE.pack(segment, offset)
        if self._txn.get(key, db=self._tables["pending"]) != _U64.pack(length):
            return
        self._delete("pending", key)
        state = self._known(segment)
        pending = state.pending_bytes - length
        self.put_segment(segment, msgspec.structs.replace(state, pending_bytes=pending))

    def new_segment_id(self) -> int:
        """An id never given out before."""
        segment = self.next_segment()
        self._put("meta", b"next_segment", _U64.pack(segment + 1))
        return segment

    def put_segment(self, segment: int, state: Segment | None) -> None:
        """Set or drop (None) the state of a segment, and its charge with it."""
        key = _U64.pack(segment)
        old = self.segment(segment)
        charge = (state.charge if state else 0) - (old.charge if old else 0)
        if charge:
            self._put("meta", b"used", _U64.pack(self.used() + charge))
        if state is None:
            self._delete("segments", key)
        else:
            self._put("segments", key, _encode(state))
        if state is not None and state.active:
            self._put("active", key, f"pid {os.getpid()}".encode(), overwrite=False)
        else:
            self._delete("active", key)

    def drop_segment(self, segment: int) -> int:
        """Drop a segment with all its records, the file being gone; the number of records."""
        extents = self.extents(segment)
        for offset, name in extents:
            entry = self.entry(name)
            if entry is not None and (entry.segment, entry.offset) == (segment, offset):
                self._unlist(name, entry)
        for _, offset, _ in list(self.pending(segment)):
            self._delete("pending", _PLACE.pack(segment, offset))
        self.put_segment(segment, None)
        return len(extents)

    def clear(self) -> None:
        """Drop every record; sealed segments become empty, active ones keep their owner."""
        for segment, state in list(self.segments()):
            if state.active:
                for _, name in self.extents(segment):
                    self.remove(name, self._listed(name))
                continue
            for _, offset, _ in list(self.pending(segment)):
                self._delete("pending", _PLACE.pack(segment, offset))
            whole = state.live_bytes + state.pending_bytes
            self._put("pending", _PLACE.pack(segment, 0), _U64.pack(whole))
            self.put_segment(segment, Segment(False, state.size, pending_bytes=whole))
        for table in ("entries", "lru", "extents", "namespaces"):
            self._txn.drop(self._tables[table], delete=False)

    def name_namespace(self, namespace: NamespaceId) -> None:
        """Keep the readable identity of a namespace."""
        layout = namespace.layout
        row = NamespaceRow(namespace.identity, layout.layers, layout.part_bytes)
        self._put("namespaces", namespace.digest, _encode(row), overwrite=False)

    def drop_namespace(self, digest: bytes) -> None:
        """Forget the identity of a namespace without records."""
        self._delete("namespaces", digest)

    def recompute_used(self) -> None:
        """Account anew from the segments, whatever was noted."""
        used = sum(state.charge for _, state in self.segments())
        self._put("meta", b"used", _U64.pack(used))

    def set_next_segment(self, segment: int) -> None:
        """The next id to give out, after a rebuild."""
        self._put("meta", b"next_segment", _U64.pack(segment))

    # Rows

    def _places(self, table: str, segment: int | None) -> Iterator[tuple[tuple[int, int], bytes]]:
        with self._txn.cursor(self._tables[table]) as cursor:
            if not cursor.set_range(_U64.pack(segment or 0)):
                return
            for key, value in cursor:
                place = _PLACE.unpack(key)
                if segment is not None and place[0] != segment:
                    return
                yield (place[0], place[1]), value

    def _unlist(self, name: bytes, entry: Entry) -> None:
        self._delete("entries", name)
        self._delete("lru", _U64.pack(entry.stamp) + name)
        self._delete("extents", _PLACE.pack(entry.segment, entry.offset))

    def _listed(self, name: bytes) -> Entry:
        entry = self.entry(name)
        if entry is None:
            raise IndexBrokenError(f"extent of {name.hex()} without its entry")
        return entry

    def _known(self, segment: int) -> Segment:
        state = self.segment(segment)
        if state is None:
            raise IndexBrokenError(f"segment {segment} is not in the index")
        return state

    def _number(self, name: bytes) -> int:
        raw = self._txn.get(name, db=self._tables["meta"])
        return 0 if raw is None else int(_U64.unpack(raw)[0])

    def _put(self, table: str, key: bytes, value: bytes, overwrite: bool = True) -> None:
        self._txn.put(key, value, db=self._tables[table], overwrite=overwrite)

    def _delete(self, table: str, key: bytes) -> bool:
        return bool(self._txn.delete(key, db=self._tables[table]))
