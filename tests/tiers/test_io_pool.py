"""IoPool: results, exceptions, deadlines, and how many threads there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from hicache_tiers.io_pool import Buffers, HungError, IoPool


@pytest.fixture
def make_pool() -> Iterator[Callable[..., IoPool]]:
    pools: list[IoPool] = []

    def make(threads: int = 2, deadline_s: float = 0.1) -> IoPool:
        pools.append(IoPool("test-pool", threads, deadline_s))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    assert not threads()


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "test-pool" and t.is_alive()]


def test_results_and_exceptions_come_back(make_pool: Callable[..., IoPool]) -> None:
    pool = make_pool()
    jobs = [pool.submit(lambda n=n: 10 // n) for n in (5, 0, 2)]
    assert pool.wait(jobs[0]) == 2
    with pytest.raises(ZeroDivisionError):
        pool.wait(jobs[1])
    assert pool.wait(jobs[2]) == 5
    assert len(threads()) <= 2


def test_a_deadline_counts_from_the_start_not_from_the_queue(
    make_pool: Callable[..., IoPool],
) -> None:
    pool = make_pool(threads=1, deadline_s=0.5)
    pause = threading.Event()
    jobs = [pool.submit(lambda: pause.wait(0.1)) for _ in range(10)]
    assert [pool.wait(job) for job in jobs] == [False] * 10


def test_a_late_result_goes_to_discard_and_the_thread_works_again(
    make_pool: Callable[..., IoPool],
) -> None:
    pool = make_pool(threads=1)
    release, discarded = threading.Event(), threading.Event()
    late: list[int] = []

    def slow() -> int:
        release.wait(20)
        return 7

    def discard(result: int) -> None:
        late.append(result)
        discarded.set()

    with pytest.raises(HungError):
        pool.call(slow, discard)
    assert pool.call(lambda: 1) == 1, "the hung thread was replaced"
    with pytest.raises(HungError):
        pool.call(slow, discard)
    jobs = [pool.submit(lambda: 2) for _ in range(3)]
    for job in jobs:
        with pytest.raises(HungError, match="all threads hang"):
            pool.wait(job)
    assert len(threads()) == 2
    release.set()
    assert discarded.wait(20)
    assert pool.call(lambda: 3) == 3
    pool.close()
    assert late == [7, 7]


def test_a_job_nobody_waits_for_is_abandoned_too(make_pool: Callable[..., IoPool]) -> None:
    pool = make_pool(threads=1)
    release = threading.Event()
    pool.submit(lambda: release.wait(20))
    assert pool.call(lambda: 4) == 4
    release.set()


def test_a_result_that_went_to_discard_is_nobody_elses(make_pool: Callable[..., IoPool]) -> None:
    pool = make_pool(threads=1)
    release, discarded = threading.Event(), threading.Event()
    late = pool.submit(lambda: release.wait(20), discard=lambda _: discarded.set())
    assert pool.call(lambda: 5) == 5, "waiting for this one finds the other one late"
    release.set()
    assert discarded.wait(20)
    with pytest.raises(HungError):
        pool.wait(late)


def test_a_closed_pool_finishes_what_is_queued_and_takes_no_more(
    make_pool: Callable[..., IoPool],
) -> None:
    pool = make_pool(threads=1)
    done: list[int] = []
    for number in range(5):
        pool.submit(lambda number=number: done.append(number))
    pool.close()
    assert done == [0, 1, 2, 3, 4]
    with pytest.raises(HungError):
        pool.call(lambda: 1)


def test_buffers_are_reused_aligned_and_bounded() -> None:
    buffers = Buffers(spare=2)
    taken = [buffers.take(5000) for _ in range(4)]
    assert all(b.size >= 5000 and b.ctypes.data % 4096 == 0 for b in taken)
    for buffer in taken:
        buffers.give(buffer)
    again = [buffers.take(8192) for _ in range(3)]
    assert sum(any(a is b for b in taken) for a in again) == 2
