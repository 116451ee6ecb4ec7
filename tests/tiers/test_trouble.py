"""Disks that are full, refuse, or hang."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_tiers import DiskStore, RecordLayout, StoreConfig, StoreError
from tests.tiers.pages import (
    IDENTITY,
    LAYOUT,
    RECORD,
    Faults,
    disk_bytes,
    failing,
    keys_of,
    page,
    read,
    write,
)

Open = Callable[..., DiskStore]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small tmpfs can't be mounted here (needs root)")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_b03_a_full_disk_refuses_and_recovers(small_disk: Path) -> None:
    layout = RecordLayout(8, (8192, 8192))  # 128 KiB
    store = DiskStore.open(
        StoreConfig(directory=small_disk / "store", capacity_bytes=100 << 20, io_threads=2)
    )
    namespace = store.namespace(IDENTITY, layout)
    keys = keys_of(100)
    stored = [key for key in keys if write(namespace, [key])[0]]
    assert 20 <= len(stored) < 32
    assert stored == keys[: len(stored)]
    stats = store.stats()
    assert (stats.errors.write, stats.evicted) == (100 - len(stored), 0)
    assert all(read(namespace, stored))
    store.check_integrity()

    refused = write(namespace, keys)
    assert refused == [key in stored for key in keys]
    half = stored[: len(stored) // 2]
    namespace.forget(half)
    assert not any(namespace.contains(half)), "space must be freed on a full disk too"
    again = [key for key in keys[50:] if write(namespace, [key])[0]]
    assert len(again) >= len(half) - 1
    assert all(read(namespace, again)) and all(read(namespace, stored[len(half) :]))
    store.check_integrity()
    store.close()
    reopened = DiskStore.open(StoreConfig(directory=small_disk / "store", capacity_bytes=100 << 20))
    assert all(read(reopened.namespace(IDENTITY, layout), again))
    reopened.check_integrity()
    reopened.close()


def test_b03_no_space_from_the_first_byte_on(small_disk: Path) -> None:
    """Filled by somebody else: an open store goes on without storing, then stores again."""
    store = DiskStore.open(StoreConfig(directory=small_disk / "store", capacity_bytes=100 << 20))
    namespace = store.namespace(IDENTITY, LAYOUT)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    keys = keys_of(40)
    assert not all(write(namespace, keys))
    assert read(namespace, keys) == namespace.contains(keys)
    ballast.unlink()
    assert all(write(namespace, keys)) and all(read(namespace, keys))
    store.check_integrity()
    store.close()


def test_b03_no_space_to_open_says_so(small_disk: Path) -> None:
    with pytest.raises(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    config = StoreConfig(directory=small_disk / "store", capacity_bytes=100 << 20)
    with pytest.raises(StoreError, match="No space left") as raised:
        DiskStore.open(config)
    assert "\n" not in str(raised.value)
    (small_disk / "ballast").unlink()
    store = DiskStore.open(config)
    assert all(write(store.namespace(IDENTITY, LAYOUT), keys_of(3)))
    store.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("failed", [0, 2, 7])
def test_b03_a_failed_write_costs_its_own_record_only(
    open_store: Open, directory: Path, code: int, failed: int
) -> None:
    calls = Faults()
    store = open_store(calls)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(8)

    def fail(fd: int, buffer: memoryview, offset: int) -> int | None:
        place, within = divmod(offset, RECORD)
        if place != failed:
            return None
        if within:
            raise OSError(code, os.strerror(code))
        return 5000  # a part is written, then the error comes

    calls.hooks["pwrite"] = fail
    expected = [number != failed for number in range(8)]
    assert write(namespace, keys) == expected
    assert read(namespace, keys) == expected
    assert (store.stats().errors.write, store.stats().evicted) == (1, 0)
    store.check_integrity()
    calls.hooks.clear()
    assert write(namespace, keys) == [True] * 8
    assert all(read(namespace, keys))
    store.close()
    assert disk_bytes(directory) == 8 * RECORD, "nothing of the failed write remains"


def test_b03_errors_of_making_and_cutting_files(open_store: Open) -> None:
    calls = Faults()
    store = open_store(calls, segment_bytes=4 * RECORD)
    namespace = store.namespace(IDENTITY, LAYOUT)
    for name, code in [("open", errno.ENOSPC), ("open", errno.EMFILE)]:
        calls.hooks[name] = failing(code)
        assert not any(write(namespace, keys_of(6)))
        store.check_integrity()
    calls.hooks.clear()
    calls.hooks["ftruncate"] = failing(errno.EIO)
    keys = keys_of(30)
    assert all(write(namespace, keys)), "segments that can't be sealed yet are left for a sweep"
    calls.hooks.clear()
    assert all(read(namespace, keys))
    store.check_integrity()
    assert store.gc().sealed_segments == 7
    assert store.stats().evicted == 0
    assert all(read(namespace, keys))


def test_a_record_larger_than_the_cap_is_declined(open_store: Open) -> None:
    store = open_store(capacity_bytes=8 * RECORD)
    small = store.namespace(IDENTITY, LAYOUT)
    assert all(write(small, keys_of(3)))
    large = store.namespace(IDENTITY, RecordLayout(1, (8 * RECORD,)))
    assert write(large, keys_of(2)) == [False, False]
    assert store.stats().declined == 2 and store.stats().evicted == 0
    assert all(read(small, keys_of(3))), "nothing was evicted for what can't fit"


def test_a_full_index_declines_and_says_so_once(
    open_store: Open, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_store(capacity_bytes=1 << 30).close()
    path = directory / "FORMAT"
    path.write_text(path.read_text().replace(str(128 << 20), str(256 << 10)))
    store = DiskStore.open(StoreConfig(directory=directory, capacity_bytes=1 << 20))
    namespace = store.namespace(IDENTITY, RecordLayout(200, (1,)))
    assert store.usage().index_limit_bytes == 64 << 20, "a process alone raises the limit"
    store.close()
    path.write_text(path.read_text().replace(str(64 << 20), str(256 << 10)))
    keeper = DiskStore.open_existing(directory)
    namespace = keeper.namespace(IDENTITY, RecordLayout(200, (1,)))
    keys = keys_of(120)
    with caplog.at_level(logging.WARNING, "hicache_tiers"):
        stored = [key for key in keys if write(namespace, [key])[0]]
    assert 10 < len(stored) < 120
    assert keeper.stats().declined == 120 - len(stored)
    assert sum("size limit" in record.message for record in caplog.records) == 1
    assert all(read(namespace, stored))
    keeper.close()


def test_sources_may_change_after_a_write_returns(open_store: Open) -> None:
    namespace = open_store().namespace(IDENTITY, LAYOUT)
    keys = keys_of(2)
    pages = [page(key) for key in keys]
    assert all(namespace.write(keys, pages))
    for parts in pages:
        for part in parts:
            part[...] = 0
    assert all(read(namespace, keys))
