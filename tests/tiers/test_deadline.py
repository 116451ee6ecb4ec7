"""One deadline for a whole call: disks, locks and indexes that hang or are slow."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_tiers import DiskStore, StoreError, space
from hicache_tiers.io_pool import Deadline, IoPool
from tests.tiers.pages import (
    IDENTITY,
    LAYOUT,
    RECORD,
    Faults,
    blank,
    disk_bytes,
    finish,
    keys_of,
    python,
    read,
    write,
)

Open = Callable[..., DiskStore]

DEADLINE_S = 1.5
"""Long enough for a real commit on a busy machine, short enough to wait for."""


class Hang:
    """A hook that waits for `release` on the first `times` calls."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.hanging = 0

    def __call__(self, *_: object) -> None:
        with self.lock:
            if not self.left:
                return
            self.left -= 1
            self.hanging += 1
        self.released.wait(60)
        with self.lock:
            self.hanging -= 1


def test_a_hung_read_is_a_miss_and_writes_into_no_target(open_store: Open) -> None:
    calls = Faults()
    store = open_store(calls, deadline_s=DEADLINE_S, io_threads=2)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(20)
    assert all(write(namespace, keys))
    hang = calls.hooks["pread"] = Hang(1)  # the first or the second record
    targets = [blank() for _ in keys]
    hits = namespace.read(keys, targets)
    asked = calls.counts["pread"]
    assert sum(hits) == asked - 1, "what has landed stays"
    assert asked <= 2 * 2 + 1, "after a hung record no further ones are asked for"
    assert store.stats().errors.timeout == 20 - sum(hits)
    assert all(namespace.contains(keys)), "slow is not damaged"
    late = [target for target, hit in zip(targets, hits, strict=True) if not hit]
    assert all((part == 0xAA).all() for target in late for part in target)
    hang.released.set()
    assert all(read(namespace, keys))
    assert all((part == 0xAA).all() for target in late for part in target)


def test_when_all_threads_hang_reads_miss_at_once_until_one_returns(open_store: Open) -> None:
    calls = Faults()
    store = open_store(calls, deadline_s=DEADLINE_S, io_threads=2)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(20)
    assert all(write(namespace, keys))
    hang = calls.hooks["pread"] = Hang(1000)
    assert not any(read(namespace, keys))
    assert hang.hanging == 2, "one call, one deadline, however many records"
    assert not any(read(namespace, keys))
    assert hang.hanging == 4, "each thread is replaced once"
    assert not any(read(namespace, keys))
    assert hang.hanging == 4, "a disk that hangs is not asked again"
    assert namespace.contains(keys) == [True] * 20
    hang.released.set()
    for _ in range(100):
        if all(read(namespace, keys)):
            break
    assert all(read(namespace, keys))


def test_a_hung_write_is_refused_and_its_segment_left(open_store: Open, directory: Path) -> None:
    calls = Faults()
    store = open_store(calls, deadline_s=DEADLINE_S, io_threads=2)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(4)
    hang = calls.hooks["pwrite"] = Hang(1)
    first = write(namespace, keys)
    assert sum(first) == 3 and store.stats().errors.timeout == 1
    assert read(namespace, keys) == first
    store.check_integrity()
    assert all(write(namespace, keys)) and all(read(namespace, keys))
    assert store.usage().segments == 2
    store.close()
    hang.released.set()
    for _ in range(500):  # the late write lands first, then it is taken back
        time.sleep(0.02)
        if not hang.hanging and disk_bytes(directory) == 4 * RECORD:
            break
    assert disk_bytes(directory) == 4 * RECORD
    assert all(read(open_store().namespace(IDENTITY, LAYOUT), keys))


@contextlib.contextmanager
def held_index(store: DiskStore) -> Iterator[None]:
    """Somebody else has the index's write lock."""
    opened = store._now()
    assert opened is not None
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with opened.resources.index.writing():
            held.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(20)
    try:
        yield
    finally:
        release.set()
        holder.join()


def test_a_hung_index_refuses_writes_while_reads_go_on(open_store: Open) -> None:
    store = open_store(deadline_s=DEADLINE_S)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(4)
    assert all(write(namespace, keys[:2]))
    with held_index(store):
        assert write(namespace, keys) == [True, True, False, False]
        assert all(read(namespace, keys[:2]))
        assert write(namespace, keys) == [True, True, False, False]
    store.close()  # waits for the late commits
    namespace = open_store().namespace(IDENTITY, LAYOUT)
    assert all(write(namespace, keys)) and all(read(namespace, keys))


def answering_again(store: DiskStore) -> None:
    """Wait until a thread that hung on the index is back."""
    opened = store._now()
    assert opened is not None
    for _ in range(1000):
        if opened.resources.change_index(lambda: None, Deadline(DEADLINE_S)):
            return
        time.sleep(0.01)


def slow(*_: object) -> None:
    time.sleep(DEADLINE_S / 6)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every piece of work handed to a pool of threads."""
    jobs: list[Any] = []
    submit = IoPool.submit

    def noting(self: IoPool, work: Any, *args: Any) -> Any:
        jobs.append(work)
        return submit(self, work, *args)

    monkeypatch.setattr(IoPool, "submit", noting)
    return jobs


def test_a_slow_disk_is_asked_for_no_more_than_fits_the_deadline(
    open_store: Open, submitted: list[Any]
) -> None:
    calls = Faults()
    store = open_store(calls, deadline_s=DEADLINE_S, io_threads=2)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(128)
    assert all(write(namespace, keys))
    calls.hooks["pread"] = slow
    submitted.clear()
    hits = read(namespace, keys)
    assert len(submitted) <= sum(hits) + 2 * 2, "no more than the window is tried in vain"
    landed = sum(hits)
    assert 0 < landed <= 2 * 6 + 2
    assert hits == [True] * landed + [False] * (128 - landed)
    assert calls.counts["pread"] <= landed + 2, "one under way on each thread"
    stats = store.stats()
    assert stats.errors.timeout == stats.misses == 128 - landed
    calls.hooks.clear()
    assert all(read(namespace, keys))


def test_a_slow_disk_stores_what_fits_the_deadline(open_store: Open) -> None:
    calls = Faults()
    store = open_store(calls, deadline_s=DEADLINE_S, io_threads=2)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(128)
    calls.hooks["pwrite"] = slow
    stored = write(namespace, keys)
    landed = sum(stored)
    assert 0 < landed <= 2 * 6 + 2
    assert calls.counts["pwrite"] <= landed + 2
    assert store.stats().errors.timeout == 128 - landed
    assert store.stats().written_records == landed
    calls.hooks.clear()
    assert read(namespace, keys) == stored
    assert all(write(namespace, keys)) and all(read(namespace, keys))


def test_a_write_that_waits_for_another_ends_in_time(open_store: Open) -> None:
    calls = Faults()
    store = open_store(calls, deadline_s=DEADLINE_S, io_threads=2)
    namespace = store.namespace(IDENTITY, LAYOUT)
    opened = store._now()
    assert opened is not None
    with opened.writer._lock:
        assert not any(write(namespace, keys_of(20)))
    assert calls.counts["pwrite"] == 0 and store.stats().errors.timeout == 20
    assert all(write(namespace, keys_of(20)))


def test_a_clear_that_waits_for_the_index_says_so(open_store: Open) -> None:
    store = open_store(deadline_s=DEADLINE_S)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(4)
    assert all(write(namespace, keys))
    with held_index(store):
        for clear in (store.clear, namespace.clear):
            with pytest.raises(
                StoreError, match=r"could not be cleared: .*; .* try again"
            ) as raised:
                clear()
            assert "\n" not in str(raised.value)
        assert all(read(namespace, keys))
    answering_again(store)
    namespace.clear()
    assert not any(namespace.contains(keys))
    assert all(write(namespace, keys))
    store.clear()
    assert store.usage().records == 0


def test_a_store_closed_over_a_held_index_opens_again(open_store: Open) -> None:
    store = open_store(deadline_s=DEADLINE_S)
    assert all(write(store.namespace(IDENTITY, LAYOUT), keys_of(4)))
    with held_index(store):
        store.close()
        with pytest.raises(StoreError, match="cannot open the index"):
            open_store(deadline_s=DEADLINE_S)
    for _ in range(1000):  # the late commits end first
        with contextlib.suppress(StoreError):
            store = open_store(deadline_s=DEADLINE_S)
            break
        time.sleep(0.01)
    assert all(read(store.namespace(IDENTITY, LAYOUT), keys_of(4)))


def test_accesses_are_noted_by_one_job_while_the_index_hangs(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "_TOUCHES_KEPT", 1)
    store = open_store(deadline_s=DEADLINE_S)
    namespace = store.namespace(IDENTITY, LAYOUT)
    assert all(write(namespace, keys_of(4)))
    opened = store._now()
    assert opened is not None
    with held_index(store):
        for _ in range(50):
            assert all(read(namespace, keys_of(4)))
        assert len(opened.resources.index_thread._queue) <= 1


SWEEPER = """
import sys
from pathlib import Path
from hicache_tiers import DiskStore, StoreConfig
DiskStore.open(StoreConfig(directory=Path(sys.argv[1]), capacity_bytes=1 << 26)).close()
"""


def test_a_publication_that_comes_after_others_sealed_the_segment_is_void(
    open_store: Open, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(deadline_s=DEADLINE_S)
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(8)
    assert all(write(namespace, keys[:3]))
    opened = store._now()
    assert opened is not None
    publish, gate, outcome = opened.resources.space.publish, threading.Event(), []

    def late(*args: Any) -> bool:
        gate.wait(60)
        outcome.append(publish(*args))
        return outcome[0]

    monkeypatch.setattr(opened.resources.space, "publish", late)
    assert not any(write(namespace, keys[3:]))
    finish(python(SWEEPER, directory))
    gate.set()
    for _ in range(1000):
        if outcome:
            break
        time.sleep(0.01)
    assert outcome == [False]
    monkeypatch.undo()
    assert read(namespace, keys) == [True] * 3 + [False] * 5
    store.check_integrity()
    assert all(write(namespace, keys)) and all(read(namespace, keys))
