"""Several processes on one directory, killed ones, forked ones, and many opens in one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_tiers import DiskStore, RecordLayout, StoreConfig, StoreError
from tests.tiers.pages import (
    IDENTITY,
    LAYOUT,
    RECORD,
    disk_bytes,
    finish,
    keys_of,
    python,
    read,
    segments_of,
    write,
)

Open = Callable[..., DiskStore]

PRELUDE = """
import random, sys, time
from pathlib import Path
from hicache_tiers import DiskStore, StoreConfig
from tests.tiers.pages import *

def open_store(capacity, segment=None):
    return DiskStore.open(StoreConfig(
        directory=Path(sys.argv[1]), capacity_bytes=capacity, segment_bytes=segment, io_threads=2))
"""

SHARER = (
    PRELUDE
    + """
seed, rounds, capacity = map(int, sys.argv[2:5])
store = open_store(capacity)
namespace = store.namespace(IDENTITY, LAYOUT)
rng, keys = random.Random(seed), keys_of(64)
hits = 0
for _ in range(rounds):
    write(namespace, [rng.choice(keys)])
    hits += read(namespace, [rng.choice(keys)])[0]
store.close()
print(hits)
"""
)


@pytest.mark.parametrize("rounds", [150, pytest.param(2000, marks=pytest.mark.full)])
def test_b04_three_owners_and_one_who_unlinks(directory: Path, rounds: int) -> None:
    """Every hit has the right bytes (checked in the processes), nobody fails."""
    capacity = 16 * RECORD
    sharers = [python(SHARER, directory, seed, rounds, capacity) for seed in range(3)]
    rng = random.Random(9)
    while any(sharer.poll() is None for sharer in sharers):
        for path in rng.sample(segments_of(directory), min(1, len(segments_of(directory)))):
            path.unlink(missing_ok=True)
        time.sleep(0.05)
    assert sum(int(finish(sharer, 240)) for sharer in sharers) > 0
    store = DiskStore.open(StoreConfig(directory=directory, capacity_bytes=capacity))
    store.gc()
    namespace = store.namespace(IDENTITY, LAYOUT)
    read(namespace, keys_of(64))
    assert all(write(namespace, keys_of(3)))
    store.check_integrity()
    store.close()


WRITER = (
    PRELUDE
    + """
first, count, capacity, segment = map(int, sys.argv[2:6])
store = open_store(capacity, segment)
namespace = store.namespace(IDENTITY, LAYOUT)
stored = 0
for start in range(first, first + count, 4):
    batch = keys_of(4, start)
    stored += sum(write(namespace, batch))
    read(namespace, batch)
assert not store.stats().errors.write, store.stats()
store.close()
print(stored)
"""
)


def test_the_cap_holds_on_disk_with_three_writers(directory: Path) -> None:
    capacity, count = 64 * RECORD, 400
    writers = [python(WRITER, directory, n * 10_000, count, capacity, 8 * RECORD) for n in range(3)]
    most = 0
    while any(writer.poll() is None for writer in writers):
        most = max(most, disk_bytes(directory))
        time.sleep(0.002)
    stored = sum(int(finish(writer)) for writer in writers)
    assert stored > 3 * count * 0.9
    assert capacity // 2 < most <= capacity
    store = DiskStore.open(StoreConfig(directory=directory, capacity_bytes=capacity))
    store.check_integrity()
    assert store.usage().used_bytes <= capacity
    store.close()


def test_the_least_recently_used_goes_first_over_all_processes(
    open_store: Open, directory: Path
) -> None:
    capacity = 64 * RECORD
    store = open_store(capacity_bytes=capacity)
    namespace = store.namespace(IDENTITY, LAYOUT)
    hot, rest = keys_of(4), keys_of(36, 4)
    assert all(write(namespace, hot)) and all(write(namespace, rest))
    assert all(read(namespace, hot))
    assert all(write(namespace, keys_of(1, 900)))  # takes the accesses to the index
    finish(python(WRITER, directory, 1000, 40, capacity, 4 * RECORD))
    assert namespace.contains(hot) == [True] * 4, "another process evicted what this one uses"
    assert sum(namespace.contains(rest)) < 30
    assert all(namespace.contains(keys_of(40, 1000)))


KILLED = (
    PRELUDE
    + """
store = open_store(1 << 24, 24 * RECORD)
namespace = store.namespace(IDENTITY, LAYOUT)
start = int(sys.argv[2])
while True:
    batch = keys_of(5, start)
    for key, stored in zip(batch, write(namespace, batch)):
        print(key, int(stored), flush=True)
    if start % 15 == 0:
        print(batch[0], 0, flush=True)
        namespace.forget(batch[:1])
    start += 5
"""
)


@pytest.mark.parametrize("rounds", [5, pytest.param(30, marks=pytest.mark.full)])
def test_kill_9_loses_nothing_acknowledged(directory: Path, rounds: int) -> None:
    rng = random.Random(rounds)
    acknowledged: dict[str, bool] = {}
    for number in range(rounds):
        writer = python(KILLED, directory, number * 100_000)
        assert writer.stdout is not None
        for _ in range(rng.randrange(1, 60)):
            key, stored = writer.stdout.readline().split()
            acknowledged[key] = stored == "1"
        time.sleep(rng.random() / 50)
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read()
        writer.communicate()
        for line in rest.splitlines():
            if len(line) == 66:
                acknowledged[line[:64]] = line[65] == "1"
        store = DiskStore.open(StoreConfig(directory=directory, capacity_bytes=1 << 24))
        used = disk_bytes(directory) + 4096 * len(segments_of(directory))
        assert store.usage().used_bytes == used, "the dead owner's segment was not cut"
        namespace = store.namespace(IDENTITY, LAYOUT)
        kept = [key for key, stored in acknowledged.items() if stored]
        assert all(read(namespace, kept))
        store.check_integrity()
        assert store.stats().errors == type(store.stats().errors)()
        store.close()


def test_a_killed_owner_is_swept_while_others_run(open_store: Open, directory: Path) -> None:
    store = open_store(capacity_bytes=1 << 24)
    writer = python(KILLED, directory, 0)
    assert writer.stdout is not None
    writer.stdout.readline()
    assert store.gc().sealed_segments == 0, "its owner lives"
    writer.kill()
    writer.communicate()
    assert store.gc().sealed_segments == 1


HOLDER = (
    PRELUDE
    + """
store = open_store(32 * RECORD)
assert all(write(store.namespace(IDENTITY, LAYOUT), keys_of(1, 500)))
print("active", flush=True)
sys.stdin.read()
"""
)


def test_nothing_is_evicted_for_room_that_others_hold(open_store: Open, directory: Path) -> None:
    store = open_store(capacity_bytes=32 * RECORD)
    small = store.namespace(IDENTITY, LAYOUT)
    assert all(write(small, keys_of(4)))
    holder = python(HOLDER, directory)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "active\n", holder.communicate()
    large = store.namespace(IDENTITY, RecordLayout(1, (30 * RECORD,)))
    assert write(large, keys_of(1)) == [False]
    assert all(small.contains(keys_of(4)))
    assert (store.stats().declined, store.stats().evicted) == (1, 0)
    finish(holder)  # closes its input; it ends without closing its store
    assert write(large, keys_of(1)) == [True]


def in_child(work: Callable[[], bool]) -> None:
    """Fork, do `work` in the child, and expect it to be true there."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if work() else 2
        os._exit(code)
    for _ in range(1500):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0


def test_fork_after_open(open_store: Open, directory: Path) -> None:
    store = open_store()
    namespace = store.namespace(IDENTITY, LAYOUT)
    keys = keys_of(12)
    assert all(write(namespace, keys[:4]))

    def child() -> bool:
        there = all(read(namespace, keys[:4])) and all(write(namespace, keys[4:8]))
        again = all(read(namespace, keys[:8]))
        store.close()
        return there and again

    # While another thread holds locks of the store and of its pools:
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            read(namespace, keys[:4])
            write(namespace, keys[8:])
            namespace.forget(keys[8:])

    thread = threading.Thread(target=busy)
    thread.start()
    for _ in range(5):
        in_child(child)
        namespace.forget(keys[4:8])
    stop.set()
    thread.join()
    in_child(child)
    assert all(read(namespace, keys[:8]))
    assert all(write(namespace, keys))
    store.check_integrity()


def test_a_forked_child_does_not_keep_the_parents_segment(directory: Path) -> None:
    """The parent dies, its child lives on: the parent's segment counts as left behind."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        with contextlib.suppress(BaseException):
            store = DiskStore.open(StoreConfig(directory=directory, capacity_bytes=1 << 24))
            write(store.namespace(IDENTITY, LAYOUT), keys_of(4))
            if os.fork() == 0:
                os.close(reading)
                os.write(writing, b"%d\n" % os.getpid())
                time.sleep(60)
        os._exit(0)
    os.waitpid(parent, 0)
    grandchild = int(os.read(reading, 20))
    try:
        store = DiskStore.open(StoreConfig(directory=directory, capacity_bytes=1 << 24))
        assert all(read(store.namespace(IDENTITY, LAYOUT), keys_of(4)))
        assert store.usage().used_bytes == 4 * RECORD + 4096
        store.check_integrity()
        store.close()
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def spawned(directory: Path, start: int) -> bool:
    store = DiskStore.open(StoreConfig(directory=directory, capacity_bytes=64 << 20))
    namespace = store.namespace(IDENTITY, LAYOUT)
    good = all(write(namespace, keys_of(4, start))) and all(read(namespace, keys_of(4)))
    store.close()
    return good


def test_spawn_after_open(open_store: Open, directory: Path) -> None:
    store = open_store()
    namespace = store.namespace(IDENTITY, LAYOUT)
    assert all(write(namespace, keys_of(4)))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(spawned, (directory, 100)).get(timeout=60)
    assert all(read(namespace, keys_of(4, 100)))


def test_two_opens_in_one_process_are_one_store(open_store: Open, directory: Path) -> None:
    first = open_store()
    link = directory.parent / "link"
    link.symlink_to(directory)
    assert open_store() is first
    with pytest.raises(StoreError, match="other settings"):
        open_store(capacity_bytes=1 << 20)
    with pytest.raises(StoreError, match="other settings"):
        open_store(directory=link)
    namespace = first.namespace(IDENTITY, LAYOUT)
    first.close()
    assert all(write(namespace, keys_of(2))), "open until the last close"
    first.close()
    assert write(namespace, keys_of(2)) == [False] * 2
    first.close()  # once too often is no harm


def test_twenty_rounds_leave_no_threads_and_no_descriptors(open_store: Open) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def round_(number: int) -> None:
        store = open_store(segment_bytes=4 * RECORD)
        namespace = store.namespace(IDENTITY, LAYOUT)
        assert all(write(namespace, keys_of(8, number * 8)))
        assert all(read(namespace, keys_of((number + 1) * 8)))
        store.close()

    round_(0)
    before = threading.active_count(), descriptors()
    for number in range(1, 21):
        round_(number)
    assert (threading.active_count(), descriptors()) == before


def test_many_threads_on_one_store(open_store: Open) -> None:
    store = open_store(capacity_bytes=32 * RECORD, io_threads=3)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            namespace = store.namespace(IDENTITY | {"shard": seed % 2}, LAYOUT)
            rng, keys = random.Random(seed), keys_of(48)
            for _ in range(20):
                batch = rng.sample(keys, 5)
                assert all(write(namespace, batch))
                read(namespace, rng.sample(keys, 5))
                if rng.random() < 0.1:
                    namespace.forget(batch[:2])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in threads)
    store.check_integrity()
    assert store.stats().errors == type(store.stats().errors)()


SUCCESSOR = (
    PRELUDE
    + """
store = open_store(1 << 24, 8 * RECORD)
namespace = store.namespace(IDENTITY, LAYOUT)
assert all(write(namespace, keys_of(40, 1000)))
print("stored", flush=True)
sys.stdin.readline()
assert all(read(namespace, keys_of(40, 1000))), store.stats()
store.check_integrity()
store.close()
"""
)


def test_who_lost_its_directory_leaves_the_next_store_alone(
    open_store: Open, directory: Path
) -> None:
    """rm -r under a running server, and another one started there."""
    store = open_store(capacity_bytes=1 << 24, segment_bytes=8 * RECORD)
    namespace = store.namespace(IDENTITY, LAYOUT)
    assert all(write(namespace, keys_of(20)))
    shutil.rmtree(directory)
    successor = python(SUCCESSOR, directory)
    assert successor.stdout is not None
    assert successor.stdout.readline() == "stored\n"
    stored = write(namespace, keys_of(100, 200))
    assert not any(stored)
    read(namespace, keys_of(20))
    namespace.forget(keys_of(20))
    with pytest.raises(StoreError, match="removed or replaced while in use"):
        store.clear()
    store.close()
    assert successor.stdin is not None
    successor.stdin.write("\n")
    finish(successor)
