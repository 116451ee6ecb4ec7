"""What the `cacheflow store` commands do: list, verify, collect; and the check of invariants."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from hicache_tiers.config import BLOCK
from hicache_tiers.errors import IntegrityError, StoreError
from hicache_tiers.index import Index, IndexLimitError
from hicache_tiers.io_pool import HungError
from hicache_tiers.rebuild import read_header
from hicache_tiers.record import DIGEST_BYTES, FORMAT, Header, entry_key, layer_checksums
from hicache_tiers.resources import Resources
from hicache_tiers.segments import SegmentFiles
from hicache_tiers.space import same_place
from hicache_tiers.stats import (
    Damage,
    GcReport,
    NamespaceInfo,
    Usage,
    VerifyReport,
)
from hicache_tiers.syscalls import read_fully
from hicache_tiers.tables import Entry, IndexBrokenError, Segment


@contextlib.contextmanager
def said_plainly(what: str) -> Iterator[None]:
    """Turn what the index raises into a `StoreError`."""
    try:
        yield
    except HungError as error:
        raise StoreError(
            f"{what}: {error}; another process or the disk holds the index, try again"
        ) from error
    except (IndexBrokenError, IndexLimitError, OSError) as error:
        raise StoreError(f"{what}: {error}; close the store and open it again") from error


def usage(resources: Resources) -> Usage:
    """See `DiskStore.usage`."""
    index = resources.index
    with said_plainly("the index can't be read"), index.reading() as txn:
        return Usage(
            used_bytes=txn.used(),
            capacity_bytes=resources.config.capacity_bytes,
            records=txn.count("entries"),
            namespaces=txn.count("namespaces"),
            segments=txn.count("segments"),
            index_bytes=index.file_bytes(),
            index_limit_bytes=index.limit_bytes,
        )


def namespaces(resources: Resources) -> list[NamespaceInfo]:
    """See `DiskStore.namespaces`."""
    index = resources.index
    records: dict[bytes, int] = defaultdict(int)
    size: dict[bytes, int] = defaultdict(int)
    newest: dict[bytes, int] = {}
    with said_plainly("the index can't be read"), index.reading() as txn:
        for name, entry in txn.entries():
            digest = name[:DIGEST_BYTES]
            records[digest] += 1
            size[digest] += entry.extent_bytes
            newest[digest] = max(newest.get(digest, 0), entry.stamp)
        rows = txn.namespaces()
    infos = [
        NamespaceInfo(
            id=digest.hex(),
            identity=json.loads(row.identity),
            layers=row.layers,
            part_bytes=row.part_bytes,
            records=records[digest],
            disk_bytes=size[digest],
            newest_access=newest[digest] / 1e6 if digest in newest else None,
        )
        for digest, row in rows.items()
    ]
    return sorted(infos, key=lambda info: info.newest_access or 0.0, reverse=True)


def verify(resources: Resources, progress: Callable[[int, int], None] | None) -> VerifyReport:
    """See `DiskStore.verify`. Records that go or move meanwhile are left out."""
    index = resources.index
    with said_plainly("the index can't be read"), index.reading() as txn:
        # Names only, in disk order: the rest is looked up again when its turn comes.
        listed = [(e.segment, e.offset, name) for name, e in txn.entries()]
    listed.sort()
    count = size = 0
    damaged: list[Damage] = []
    for done, (_, _, name) in enumerate(listed, start=1):
        before = _entry(index, name)
        if before is not None:
            why, header = _examine(before, name, resources)
            after = _entry(index, name)
            if after is not None and same_place(after, before):
                count += 1
                if why:
                    namespace, digest = name[:DIGEST_BYTES], name[DIGEST_BYTES:]
                    key = header.key.decode("utf-8", "replace") if header else digest.hex()
                    damaged.append(Damage(namespace.hex(), key, why))
                elif header:
                    size += header.payload_bytes
        if progress is not None:
            progress(done, len(listed))
    return VerifyReport(count, size, tuple(damaged))


def _entry(index: Index, name: bytes) -> Entry | None:
    with said_plainly("the index can't be read"), index.reading() as txn:
        return txn.entry(name)


def _examine(entry: Entry, name: bytes, resources: Resources) -> tuple[str, Header | None]:
    """What is wrong with a record ("" if nothing), and its header as far as it is readable."""
    try:
        with resources.files.reading(entry.segment) as fd:
            header = read_header(fd, entry.segment, entry.offset)
            if header is None:
                return "the header is damaged", None
            if entry_key(header.namespace, header.key) != name:
                return "the header is another record's", header
            payload = np.empty(header.payload_bytes, dtype=np.uint8)
            place = entry.offset + entry.header_bytes
            if read_fully(resources.calls, fd, payload.data, place) < payload.size:
                return "the file is cut short", header
    except OSError as error:
        return f"not readable: {error.strerror}", None
    layout = header.namespace_id.layout
    sums = layer_checksums(payload, layout, header.namespace, header.key)
    wrong = np.frombuffer(sums, "<u8") != np.frombuffer(entry.checksums, "<u8")
    if wrong.any():
        return f"layers {np.flatnonzero(wrong).tolist()} differ from their checksums", header
    return ("" if header.checksums == entry.checksums else "header and index disagree"), header


def collect(resources: Resources, capacity_bytes: int) -> GcReport:
    """See `DiskStore.gc`."""
    index, space, counters = resources.index, resources.space, resources.counters
    with said_plainly("the index can't be changed"):
        with index.reading() as txn:
            used = txn.used()
        evicted = counters.snapshot().evicted
        sealed = space.sweep()
        lost = _drop_unreachable(resources)
        space.settle(again=True)
        space.make_room(0, capacity_bytes)
        stray = _remove_strays(index, resources.files)
        _drop_empty_namespaces(index)
        with index.reading() as txn:
            freed = used - txn.used()
    return GcReport(
        sealed_segments=sealed,
        stray_files=stray,
        lost_records=lost,
        evicted_records=counters.snapshot().evicted - evicted,
        freed_bytes=max(freed, 0),
    )


def _drop_unreachable(resources: Resources) -> int:
    """Drop records without a file, and of another format; how many."""
    files, space = resources.files, resources.space
    with resources.index.reading() as txn:
        segments = [segment for segment, _ in txn.segments()]
        foreign = [(name, entry) for name, entry in txn.entries() if entry.format != FORMAT]
    lost = sum(space.lose(s) for s in segments if not files.path(s).exists())
    space.remove(foreign)
    return lost + len(foreign)


def _remove_strays(index: Index, files: SegmentFiles) -> int:
    """Remove segment files that no process can reach; how many."""
    present = [segment for segment, _ in files.listed()]
    stray = 0
    # Under the write lock: a segment that is just being created has no row yet.
    with index.writing() as txn:
        for segment in present:
            if txn.segment(segment) is None and files.path(segment).exists():
                files.remove(segment)
                stray += 1
    return stray


def _drop_empty_namespaces(index: Index) -> None:
    with index.writing() as txn:
        filled = {name[:DIGEST_BYTES] for name, _ in txn.entries()}
        for digest in txn.namespaces():
            if digest not in filled:
                txn.drop_namespace(digest)


def check_integrity(resources: Resources) -> None:
    """See `DiskStore.check_integrity`."""
    index, files = resources.index, resources.files
    with index.reading() as txn:
        extents: dict[int, list[tuple[int, int]]] = defaultdict(list)
        live: dict[int, int] = defaultdict(int)
        records: dict[int, int] = defaultdict(int)
        for name, entry in txn.entries():
            extents[entry.segment].append((entry.offset, entry.extent_bytes))
            live[entry.segment] += entry.extent_bytes
            records[entry.segment] += 1
            _check_record(files, name, entry)
        pending: dict[int, int] = defaultdict(int)
        for segment, offset, length in txn.pending():
            pending[segment] += length
            extents[segment].append((offset, length))
        states = dict(txn.segments())
        listed = {(s, offset): name for s in states for offset, name in txn.extents(s)}
        entries = {(entry.segment, entry.offset): name for name, entry in txn.entries()}
        _expect(listed == entries, "the tables of extents and entries differ")
        stamped = {name: entry.stamp for name, entry in txn.entries()}
        _expect(txn.stamps() == stamped, "the tables of accesses and entries differ")
        _expect(set(extents) <= set(states), "extents of unknown segments")
        active = [segment for segment, state in states.items() if state.active]
        _expect(txn.active() == active, f"active table {txn.active()}, segments say {active}")
        charged = sum(state.charge for state in states.values())
        _expect(txn.used() == charged, f"used {txn.used()}, charged {charged}")
    for segment, state in states.items():
        tallied = (live[segment], records[segment], pending[segment])
        noted = (state.live_bytes, state.live_records, state.pending_bytes)
        _expect(tallied == noted, f"segment {segment}: index says {noted}, found {tallied}")
        _check_file(files, segment, state, sorted(extents[segment]))
    known = set(states)
    stray = [path for segment, path in files.listed() if segment not in known]
    _expect(not stray, f"segment files unknown to the index: {stray}")


def _check_record(files: SegmentFiles, name: bytes, entry: Entry) -> None:
    aligned = entry.offset % BLOCK == entry.extent_bytes % BLOCK == entry.header_bytes % BLOCK == 0
    _expect(aligned, f"{name.hex()} is not aligned")
    with files.reading(entry.segment) as fd:
        header = read_header(fd, entry.segment, entry.offset)
    _expect(header is not None, f"{name.hex()} has no header at its place")
    if header is not None:
        same = entry_key(header.namespace, header.key) == name
        _expect(same, f"{name.hex()}: the header is another record's")
        _expect(header.extent_bytes == entry.extent_bytes, f"{name.hex()}: lengths differ")


def _check_file(
    files: SegmentFiles, segment: int, state: Segment, extents: list[tuple[int, int]]
) -> None:
    end = 0
    for offset, length in extents:
        _expect(offset >= end, f"segment {segment}: extents overlap at {offset}")
        end = offset + length
    _expect(end <= state.size, f"segment {segment}: extents beyond its end")
    info = files.path(segment).stat()
    disk = info.st_blocks * 512
    _expect(info.st_size >= end or not state.live_records, f"segment {segment}: file is short")
    _expect(
        disk <= state.charge, f"segment {segment}: {disk} bytes on disk, {state.charge} charged"
    )
    _expect(info.st_mode & 0o077 == 0, f"segment {segment}: open to others")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise IntegrityError(otherwise)
