"""Room: caps, eviction, collection, and what is freed when."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_tiers import DiskStore, StoreConfig, StoreError, space, writer
from hicache_tiers.segments import segment_path
from tests.tiers.pages import (
    IDENTITY,
    LAYOUT,
    RECORD,
    Faults,
    disk_bytes,
    finish,
    keys_of,
    python,
    read,
    segments_of,
    write,
)

Open = Callable[..., DiskStore]


def test_gc_removes_what_no_index_entry_reaches(open_store: Open, directory: Path) -> None:
    store = open_store(segment_bytes=2 * RECORD)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(8)
    write(namespace, keys)
    stray = segment_path(directory / "segments", 99)
    stray.write_bytes(bytes(RECORD))
    segments_of(directory)[0].unlink()
    report = store.gc()
    assert (report.stray_files, report.lost_records, report.evicted_records) == (1, 2, 0)
    assert not stray.exists()
    assert read(namespace, keys) == [False] * 2 + [True] * 6
    namespace.forget(keys)
    store.gc()
    assert store.usage().namespaces == 0 and segments_of(directory) == []
    assert all(write(namespace, keys)) and all(read(namespace, keys))


def test_segments_are_a_sixteenth_of_the_capacity(tmp_path: Path) -> None:
    def limit(**settings: int) -> int:
        return StoreConfig(directory=tmp_path, **settings).segment_limit

    assert limit(capacity_bytes=1 << 30) == 64 << 20
    assert limit(capacity_bytes=1 << 40) == 256 << 20
    assert limit(capacity_bytes=1) == limit(capacity_bytes=100_000) == 4096
    assert limit(capacity_bytes=1 << 30, segment_bytes=10_000) == 8192


def test_a_collection_applies_the_cap_it_is_given(open_store: Open) -> None:
    store = open_store(segment_bytes=8 * RECORD)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(40)
    for key in keys:
        write(namespace, [key])
    assert store.gc().evicted_records == 0
    used = store.usage().used_bytes
    report = store.gc(16 * RECORD)
    usage = store.usage()
    assert usage.used_bytes <= 16 * RECORD
    assert report.evicted_records == 40 - usage.records > 20
    assert report.freed_bytes == used - usage.used_bytes
    assert namespace.contains(keys) == [False] * (40 - usage.records) + [True] * usage.records
    assert all(write(namespace, keys)) and store.stats().evicted == report.evicted_records


def test_a_clock_set_back_does_not_make_new_records_the_oldest(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = int(time.time() + 86400) * 1_000_000
    settings = {"capacity_bytes": 64 * RECORD, "segment_bytes": 4 * RECORD}
    for module in (space, writer):
        monkeypatch.setattr(module, "now_us", lambda: ahead)
    store = open_store(**settings)
    assert all(write(store.namespace(IDENTITY, LAYOUT), keys_of(50)))
    store.close()
    monkeypatch.undo()
    namespace = open_store(**settings).namespace(IDENTITY, LAYOUT)
    hot = keys_of(4)
    for start in range(1000, 1100, 5):
        assert all(read(namespace, hot)), "used all the time"
        assert all(write(namespace, keys_of(5, start)))
    assert not any(namespace.contains(keys_of(46, 4)))
    assert all(namespace.contains(keys_of(30, 1070)))


def test_a_smaller_cap_is_applied_by_the_first_write(open_store: Open, directory: Path) -> None:
    store = open_store()
    keys = keys_of(64)
    for key in keys:
        write(store.namespace(IDENTITY, LAYOUT), [key])
    store.close()
    small = open_store(capacity_bytes=16 * RECORD)
    namespace = small.namespace(IDENTITY, LAYOUT)
    backwards = keys[::-1]  # of one call the later records count as used earlier
    assert all(read(namespace, backwards)), "opening evicts nothing"
    assert all(write(namespace, backwards))
    assert all(namespace.contains(keys)), "nor does a write of what is there"
    assert all(write(namespace, keys_of(1, 900)))
    assert disk_bytes(directory) <= small.usage().used_bytes <= 16 * RECORD
    kept = namespace.contains(keys)
    assert kept == [False] * (64 - sum(kept)) + [True] * sum(kept), "the oldest go first"
    assert sum(kept) > 10


def test_looking_after_a_store_evicts_nothing(open_store: Open, directory: Path) -> None:
    store = open_store()
    keys = keys_of(20)
    write(store.namespace(IDENTITY, LAYOUT), keys)
    store.close()
    with pytest.raises(StoreError, match="holds no store"):
        DiskStore.open_existing(directory / "index")
    keeper = DiskStore.open_existing(directory)
    assert keeper.verify().records == 20 and keeper.gc().evicted_records == 0
    assert all(read(keeper.namespace(IDENTITY, LAYOUT), keys))
    keeper.close()


CLEARS = """
import sys
from pathlib import Path
from hicache_tiers import DiskStore
store = DiskStore.open_existing(Path(sys.argv[1]))
store._now().resources.space.settle = lambda again=False: None  # stopped before it frees
store.clear()
"""


def test_a_clear_between_freeing_and_crediting_is_not_lost(
    open_store: Open, directory: Path
) -> None:
    calls = Faults()
    store = open_store(calls, segment_bytes=8 * RECORD)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(16)
    assert all(write(namespace, keys))
    cleared: list[str] = []

    def clear_once(*_: object) -> None:
        if not cleared:
            cleared.append(finish(python(CLEARS, directory)))

    calls.hooks["punch"] = clear_once
    namespace.forget(keys[:1])
    assert cleared and not any(namespace.contains(keys))
    store.gc()
    store.check_integrity()
    assert store.usage().used_bytes == 0 and segments_of(directory) == []
