"""A new index from the headers of the records, for a process that is alone in the directory."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from hicache_tiers.config import BLOCK
from hicache_tiers.index import IndexLimitError, mark_whole, new_index
from hicache_tiers.record import FORMAT, Header, decode_header, entry_key, header_span
from hicache_tiers.segments import segment_files
from hicache_tiers.tables import Entry, Segment, Txn

logger = logging.getLogger("hicache_tiers")


def rebuild(index_directory: Path, limit_bytes: int, segments: Path) -> None:
    """Replace the index. Payloads are not read: a record that is damaged shows when it is read.

    Records that were dropped but whose bytes are still there come back; what lies between records
    is noted for freeing. An unreadable segment file is noted for removal. Where the index has no
    room for all, the newest segments stay and the files of the others are removed.
    """
    index = new_index(index_directory, limit_bytes)
    files = sorted(segment_files(segments), reverse=True)  # ids grow with time
    records = 0
    try:
        with index.writing() as txn:
            txn.set_next_segment(files[0][0] + 1 if files else 0)
        for number, (segment, path) in enumerate(files):
            try:
                with index.writing() as txn:
                    records += _add_segment(txn, segment, path)
            except IndexLimitError:
                _remove(index_directory, [path for _, path in files[number:]])
                break
    finally:
        index.close(timeout_s=0.0)
    mark_whole(index_directory)
    if records:
        logger.warning("%s: rebuilt from the segments, %d records", index_directory, records)


def _remove(index_directory: Path, paths: list[Path]) -> None:
    """Remove segments that the index has no room for; what can't be removed is for `gc`."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
    logger.warning(
        "%s: the index has reached its size limit: the records of the %d oldest segments are "
        "dropped; use a larger capacity or larger pages",
        index_directory,
        len(paths),
    )


def _add_segment(txn: Txn, segment: int, path: Path) -> int:
    """Enter one segment file as sealed; the number of its records."""
    info = path.stat()
    stamp = max(info.st_mtime_ns // 1000, 0)
    txn.put_segment(segment, Segment(active=False, size=info.st_size))
    count = end = 0
    try:
        for header in _headers(segment, path):
            if header.offset > end:
                txn.add_pending(segment, end, header.offset - end)
            end = header.offset + header.extent_bytes
            name = entry_key(header.namespace, header.key)
            if txn.entry(name) is not None:
                txn.add_pending(segment, header.offset, header.extent_bytes)
                continue
            txn.name_namespace(header.namespace_id)
            txn.add(name, _entry(header, stamp))
            count += 1
    except OSError as error:
        logger.warning("%s can't be read, its records are lost: %s", path, error)
    rest = info.st_size - end
    if rest > 0 or not count:
        txn.add_pending(segment, end, -(-max(rest, 0) // BLOCK) * BLOCK)
    return count


def _entry(header: Header, stamp: int) -> Entry:
    return Entry(
        FORMAT,
        header.segment,
        header.offset,
        header.header_bytes,
        header.extent_bytes,
        stamp,
        header.checksums,
    )


def _headers(segment: int, path: Path) -> Iterator[Header]:
    """The whole records of a segment file, in order, by their headers."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        offset = 0
        while (offset := _next_data(fd, offset)) < size:
            header = read_header(fd, segment, offset)
            if header is None or offset + header.extent_bytes > size:
                offset += BLOCK
                continue
            yield header
            offset += header.extent_bytes
    finally:
        os.close(fd)


def read_header(fd: int, segment: int, offset: int) -> Header | None:
    """The header at a place of a segment file; None unless a whole one is there."""
    start = os.pread(fd, BLOCK, offset)
    span = header_span(start)
    if span > BLOCK:
        start = os.pread(fd, span, offset)
    return decode_header(start, segment, offset) if span else None


def _next_data(fd: int, offset: int) -> int:
    """The next block at or after `offset` that may hold data: holes are skipped at once."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) // BLOCK * BLOCK
    except OSError as error:
        if error.errno == errno.ENXIO:
            return os.fstat(fd).st_size
        return offset
