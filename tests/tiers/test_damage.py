"""Damaged files: right bytes, a miss, or a miss that forgets. Never wrong bytes, never an error."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hicache_tiers import DiskStore, Namespace
from tests.tiers.pages import (
    IDENTITY,
    LAYOUT,
    RECORD,
    Faults,
    blank,
    entry_of,
    failing,
    file_of,
    finish,
    keys_of,
    python,
    read,
    segments_of,
    write,
)

Open = Callable[..., DiskStore]


@pytest.mark.parametrize("cut", ["to 100 bytes", "to nothing", "10 bytes too long"])
def test_b01_a_cut_record_is_a_miss_and_is_rewritten(
    store: DiskStore,
    namespace: Namespace,
    directory: Path,
    cut: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = keys_of(8)
    # Each in a segment of its own order: page 5 last, so that cutting the file cuts only it.
    order = [key for key in keys if key != keys[5]] + [keys[5]]
    assert all(write(namespace, order))
    entry = entry_of(store, namespace, keys[5])
    path = file_of(directory, entry)
    ends = {"to 100 bytes": 100, "to nothing": 0, "10 bytes too long": RECORD + 10}
    os.truncate(path, entry.offset + ends[cut])
    hit = cut == "10 bytes too long"

    with caplog.at_level(logging.WARNING, "hicache_tiers"):
        assert read(namespace, keys) == [True] * 5 + [hit] + [True] * 2
    assert store.stats().errors.corrupt == (0 if hit else 1)
    assert len(caplog.records) == (0 if hit else 1)
    assert namespace.contains(keys) == [True] * 5 + [hit] + [True] * 2
    assert write(namespace, [keys[5]]) == [True]
    assert store.stats().written_records == 8 + (not hit)
    assert read(namespace, keys) == [True] * 8


def test_a_flipped_byte_anywhere_never_gives_wrong_bytes(
    store: DiskStore, namespace: Namespace, directory: Path
) -> None:
    keys = keys_of(3)
    assert all(write(namespace, keys))
    rng = np.random.default_rng(0)
    places = [*rng.integers(0, RECORD, 40), 0, 8, 4095, 4096, RECORD - 1]
    for place in map(int, places):
        entry = entry_of(store, namespace, keys[1])
        flip(file_of(directory, entry), entry.offset + place)
        in_payload = place >= 4096
        damaged = store.verify().damaged
        assert not in_payload or [d.key for d in damaged] == [keys[1]]
        assert read(namespace, keys) == [True, not in_payload, True]
        if in_payload:
            assert write(namespace, [keys[1]]) == [True]
        else:
            flip(file_of(directory, entry), entry.offset + place)
        assert read(namespace, keys) == [True] * 3
    assert store.verify().damaged == ()


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def test_only_the_damaged_layer_is_lost_to_a_range_read(
    store: DiskStore, namespace: Namespace, directory: Path
) -> None:
    (key,) = keys_of(1)
    write(namespace, [key])
    entry = entry_of(store, namespace, key)
    flip(file_of(directory, entry), entry.offset + entry.header_bytes + LAYOUT.layer_bytes)
    assert store.verify().damaged[0].why == "layers [1] differ from their checksums"
    assert namespace.read([key], [blank(layers=2)], range(2, 4)) == [True]
    assert namespace.read([key], [blank(layers=2)], range(2)) == [False]
    assert namespace.contains([key]) == [False]


def test_right_bytes_in_a_wrong_place_are_refused(
    store: DiskStore, namespace: Namespace, directory: Path
) -> None:
    first, second = keys_of(2)
    write(namespace, [first, second])
    one, two = (entry_of(store, namespace, key) for key in (first, second))
    raw = bytearray(file_of(directory, one).read_bytes())
    raw[two.offset : two.offset + RECORD] = raw[one.offset : one.offset + RECORD]
    file_of(directory, one).write_bytes(raw)
    assert read(namespace, [first, second]) == [True, False]


def test_b04_a_removed_file_is_a_plain_miss(
    store: DiskStore, namespace: Namespace, directory: Path
) -> None:
    keys = keys_of(8)
    write(namespace, keys)
    for path in segments_of(directory):
        path.unlink()
    assert not any(read(namespace, keys))
    assert not any(namespace.contains(keys))
    # The segment that was removed under its owner is not written to again.
    assert all(write(namespace, keys))
    assert all(read(namespace, keys))


def test_a_segment_removed_while_it_is_written_acknowledges_nothing(
    open_store: Open, directory: Path
) -> None:
    calls = Faults()
    store = open_store(calls)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(6)
    assert write(namespace, keys[:2]) == [True] * 2

    def remove(*_: object) -> None:
        for path in segments_of(directory):
            path.unlink()

    calls.hooks["pwrite"] = remove
    assert not any(write(namespace, keys[2:4]))
    calls.hooks.clear()
    assert all(write(namespace, keys))
    assert store.stats().errors.write == 2
    assert all(read(namespace, keys))


def test_an_evicted_file_holds_no_space_for_those_who_have_it_open(
    store: DiskStore, namespace: Namespace, directory: Path
) -> None:
    write(namespace, keys_of(4))
    (path,) = segments_of(directory)
    with path.open("rb") as another_process:
        store.clear()
        assert not path.exists()
        assert os.fstat(another_process.fileno()).st_blocks == 0


@pytest.mark.parametrize("content", ["zeros", "garbage"])
def test_a_file_of_other_content(
    store: DiskStore, namespace: Namespace, directory: Path, content: str
) -> None:
    keys = keys_of(4)
    write(namespace, keys)
    (path,) = segments_of(directory)
    size = path.stat().st_size
    path.write_bytes(bytes(size) if content == "zeros" else os.urandom(size))
    assert not any(read(namespace, keys))
    assert not any(namespace.contains(keys))
    assert all(write(namespace, keys)) and all(read(namespace, keys))


def test_a_failed_read_forgets_but_trouble_of_our_own_does_not(open_store: Open) -> None:
    calls = Faults()
    store = open_store(calls)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(2)
    write(namespace, keys)
    calls.hooks["pread"] = failing(errno.ENOMEM)
    assert read(namespace, keys) == [False] * 2
    assert namespace.contains(keys) == [True] * 2
    calls.hooks["pread"] = failing(errno.EIO, times=1)
    assert sorted(read(namespace, keys)) == [False, True]
    assert sorted(namespace.contains(keys)) == [False, True]
    assert store.stats().errors.read == 3
    assert all(write(namespace, keys)) and all(read(namespace, keys))


def test_short_reads_and_writes_are_continued(open_store: Open) -> None:
    calls = Faults()
    namespace = open_store(calls).namespace(IDENTITY, LAYOUT)
    calls.hooks["pread"] = lambda fd, buffer, offset: 1000
    calls.hooks["pwrite"] = lambda fd, buffer, offset: 3000
    keys = keys_of(3)
    assert all(write(namespace, keys)) and all(read(namespace, keys))
    assert calls.counts["pwrite"] == 3 * 3


def test_evicted_under_the_reader_is_a_plain_miss(open_store: Open) -> None:
    calls = Faults()
    store = open_store(calls)
    namespace = store.namespace(IDENTITY, LAYOUT)
    (key,) = keys_of(1)
    write(namespace, [key])
    reading, gone = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        reading.set()
        gone.wait(20)

    calls.hooks["pread"] = wait
    outcome: list[bool] = []
    reader = threading.Thread(target=lambda: outcome.extend(read(namespace, [key])))
    reader.start()
    assert reading.wait(20)
    namespace.forget([key])
    gone.set()
    reader.join(20)
    assert outcome == [False]
    stats = store.stats()
    assert (stats.misses, stats.errors.corrupt, stats.errors.read) == (1, 0, 0)


def test_s3_without_hole_punching_whole_segments_make_room(
    open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Faults()
    calls.hooks["punch"] = failing(errno.EOPNOTSUPP)
    store = open_store(calls, capacity_bytes=24 * RECORD, segment_bytes=4 * RECORD)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(200)
    for start in range(0, 200, 3):
        batch = keys[start : start + 3]
        assert all(write(namespace, batch)) and all(read(namespace, batch))
        namespace.forget(batch[:1])
        store.check_integrity()
    assert sum("can't punch holes" in record.message for record in caplog.records) == 1
    assert store.stats().evicted > 0 and store.stats().declined == 0


def test_s6_an_unremovable_file_stops_nobody(open_store: Open) -> None:
    calls = Faults()
    store = open_store(calls, capacity_bytes=24 * RECORD, segment_bytes=2 * RECORD)
    namespace = store.namespace(IDENTITY, LAYOUT)
    victim: list[str] = []

    def refuse(path: str) -> None:
        if not victim or path in victim:
            victim.append(path)
            raise PermissionError(errno.EPERM, "Operation not permitted")

    calls.hooks["unlink"] = refuse
    keys = keys_of(120)
    for start in range(0, 120, 2):
        batch = keys[start : start + 2]
        assert all(write(namespace, batch)) and all(read(namespace, batch))
        store.check_integrity()
    assert calls.counts["unlink"] > 20
    assert len(victim) == 1, "it is not tried again and again"
    calls.hooks.clear()
    store.gc()
    assert not Path(victim[0]).exists()


UNREADABLE = """
import os, sys
from pathlib import Path
from hicache_tiers import DiskStore, StoreConfig
from tests.tiers.pages import *
page("loads numpy.random while the interpreter is readable")
os.setgroups([]); os.setgid(65534); os.setuid(65534); os.umask(0)
directory = Path(sys.argv[1])
store = DiskStore.open(StoreConfig(directory=directory, capacity_bytes=1 << 24))
namespace = store.namespace(IDENTITY, LAYOUT)
keys = keys_of(6)
assert all(write(namespace, keys))
store.close()
store = DiskStore.open(StoreConfig(directory=directory, capacity_bytes=1 << 24))
namespace = store.namespace(IDENTITY, LAYOUT)
(path,) = segments_of(directory)
path.chmod(0)
assert not any(read(namespace, keys)), "read a file of mode 000"
assert not any(namespace.contains(keys)), "still promised"
assert all(write(namespace, keys)) and all(read(namespace, keys))
assert store.stats().errors.read == 6
assert not path.exists(), "an unreadable file without records can still be removed"
path.parent.chmod(0o555)
assert all(read(namespace, keys))
store.check_integrity()
path.parent.chmod(0o700)
store.close()
for found in [directory, *directory.rglob("*")]:
    assert found.stat().st_mode & 0o022 == 0, found
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_b23_an_unreadable_file_is_a_miss_that_forgets(tmp_path: Path) -> None:
    for parent in [tmp_path, *tmp_path.parents][:3]:
        parent.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    finish(python(UNREADABLE, home / "a" / "store"))
