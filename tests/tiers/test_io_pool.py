"""IoPool: results, exceptions, deadlines, and how many threads there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from hicache_tiers.io_pool import Buffers, Deadline, HungError, IoPool


@pytest.fixture
def make_pool() -> Iterator[Callable[..., IoPool]]:
    pools: list[IoPool] = []

    def make(threads: int = 2, hung_s: float = 0.1) -> IoPool:
        pools.append(IoPool("test-pool", threads, hung_s))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close(soon())
    for thread in threads():
        thread.join(20)  # one that hung a moment ago
    assert not threads()


def soon() -> Deadline:
    return Deadline(20)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "test-pool" and t.is_alive()]


def test_results_and_exceptions_come_back(make_pool: Callable[..., IoPool]) -> None:
    pool = make_pool()
    jobs = [pool.submit(lambda n=n: 10 // n) for n in (5, 0, 2)]
    assert pool.wait(jobs[0], soon()) == 2
    with pytest.raises(ZeroDivisionError):
        pool.wait(jobs[1], soon())
    assert pool.wait(jobs[2], soon()) == 5
    assert len(threads()) <= 2


def test_a_caller_past_its_deadline_withdraws_what_has_not_started(
    make_pool: Callable[..., IoPool],
) -> None:
    pool = make_pool(threads=1, hung_s=20)
    started: list[int] = []
    release = threading.Event()

    def work(number: int) -> None:
        started.append(number)
        release.wait(20)

    jobs = [pool.submit(lambda n=n: work(n)) for n in range(5)]
    deadline = Deadline(0.1)
    for job in jobs:
        with pytest.raises(HungError, match=r"no answer within 0\.1 s"):
            pool.wait(job, deadline)
    release.set()
    assert pool.call(lambda: 6, soon()) == 6, "slow is not hung: the thread serves on"
    assert started == [0] and len(threads()) == 1


def test_what_is_there_is_handed_over_after_the_deadline(make_pool: Callable[..., IoPool]) -> None:
    pool = make_pool(threads=1)
    job = pool.submit(lambda: 8)
    pool.call(lambda: None, soon())
    assert pool.wait(job, Deadline(0)) == 8


def test_a_late_result_goes_to_discard_and_the_thread_works_again(
    make_pool: Callable[..., IoPool],
) -> None:
    pool = make_pool(threads=1)
    release, discarded = threading.Event(), threading.Semaphore(0)
    late: list[int] = []

    def slow() -> int:
        release.wait(20)
        return 7

    def discard(result: int) -> None:
        late.append(result)
        discarded.release()

    with pytest.raises(HungError):
        pool.call(slow, Deadline(0.1), discard)
    assert pool.call(lambda: 1, soon()) == 1, "the hung thread was replaced"
    with pytest.raises(HungError):
        pool.call(slow, Deadline(0.1), discard)
    jobs = [pool.submit(lambda: 2) for _ in range(3)]
    for job in jobs:
        with pytest.raises(HungError, match="all threads hang"):
            pool.wait(job, soon())
    assert len(threads()) == 2
    release.set()
    assert all(discarded.acquire(timeout=20) for _ in range(2))
    assert pool.call(lambda: 3, soon()) == 3
    pool.close(soon())
    assert late == [7, 7]


def test_a_thread_hung_at_what_nobody_waits_for_is_replaced_too(
    make_pool: Callable[..., IoPool],
) -> None:
    pool = make_pool(threads=1)
    release = threading.Event()
    pool.submit(lambda: release.wait(20))
    assert pool.call(lambda: 4, soon()) == 4
    release.set()


def test_a_closing_pool_waits_no_longer_than_it_may(make_pool: Callable[..., IoPool]) -> None:
    pool = make_pool(threads=1, hung_s=60)
    release = threading.Event()
    job = pool.submit(lambda: release.wait(20))
    queued = pool.submit(lambda: None)
    pool.close(Deadline(0.1))
    assert not job.finished and not queued.finished
    release.set()


def test_a_closed_pool_finishes_what_is_queued_and_takes_no_more(
    make_pool: Callable[..., IoPool],
) -> None:
    pool = make_pool(threads=1)
    done: list[int] = []
    for number in range(5):
        pool.submit(lambda number=number: done.append(number))
    pool.close(soon())
    assert done == [0, 1, 2, 3, 4]
    with pytest.raises(HungError):
        pool.call(lambda: 1, soon())


def test_buffers_are_reused_aligned_and_bounded() -> None:
    buffers = Buffers(spare=2)
    taken = [buffers.take(5000) for _ in range(4)]
    assert all(b.size >= 5000 and b.ctypes.data % 4096 == 0 for b in taken)
    for buffer in taken:
        buffers.give(buffer)
    again = [buffers.take(8192) for _ in range(3)]
    assert sum(any(a is b for b in taken) for a in again) == 2
