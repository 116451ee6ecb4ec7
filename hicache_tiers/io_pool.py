"""Threads for disk work, each piece with a deadline, and the buffers they fill."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from hicache_tiers.config import BLOCK
from hicache_tiers.layout import Bytes

T = TypeVar("T")


class HungError(Exception):
    """The deadline passed, or every thread hangs already, or the pool is closed."""


class Job(Generic[T]):
    """A piece of work handed to a pool. All fields belong to the pool's lock."""

    def __init__(self, work: Callable[[], T], discard: Callable[[T], None] | None) -> None:
        self.work = work
        self.discard = discard
        self.thread: threading.Thread | None = None  # this and the deadline are set at its start
        self.deadline: float | None = None
        self.finished = False
        self.abandoned = False
        self.result: T | None = None
        self.error: Exception | None = None


class IoPool:
    """Daemon threads that do blocking calls for callers who can't wait for ever.

    A job that outlasts its deadline is abandoned: its caller goes on, its thread counts as hung
    and is replaced, up to as many hung threads as the pool has places. When a hung thread comes
    back it gives its late result to `discard` and takes work again where a place is free.
    """

    def __init__(self, name: str, threads: int, deadline_s: float) -> None:
        self._name = name
        self._places = threads
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # a job ended, or threads were lost
        self._offered = threading.Condition(self._lock)  # a job waits, or the pool closes
        self._queue: deque[Job] = deque()
        self._running: set[Job] = set()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._hung: set[threading.Thread] = set()
        self._closed = False

    def submit(self, work: Callable[[], T], discard: Callable[[T], None] | None = None) -> Job[T]:
        """Queue `work`; `discard` gets its result if the caller has given up by then."""
        job = Job(work, discard)
        with self._lock:
            if not self._closed:
                self._queue.append(job)
                self._staff()
                self._offered.notify()
        return job

    def wait(self, job: Job[T]) -> T:
        """The result of `job`, or its exception; `HungError` once its time is up."""
        with self._lock:
            while not job.finished or job.abandoned:
                self._expire()
                if job.abandoned:
                    raise HungError(f"{self._name}: no answer within {self._deadline_s:g} s")
                if job.deadline is None and not self._can_start(job):
                    raise HungError(f"{self._name}: all threads hang, or the store is closed")
                self._changed.wait(self._until_next_deadline())
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]

    def call(self, work: Callable[[], T], discard: Callable[[T], None] | None = None) -> T:
        """Do `work` on a thread of the pool and wait for it."""
        return self.wait(self.submit(work, discard))

    def close(self) -> None:
        """Finish what is queued, then end all threads that are not hung."""
        with self._lock:
            self._closed = True
            self._offered.notify_all()
            while self._running or (self._queue and self._live):
                self._expire()
                self._changed.wait(self._until_next_deadline())
            self._queue.clear()
            self._changed.notify_all()
            ending = self._threads - self._hung
        for thread in ending:
            thread.join()

    @property
    def _live(self) -> int:
        return len(self._threads) - len(self._hung)

    def _until_next_deadline(self) -> float:
        """Seconds; what starts after this can't be due before a whole deadline has passed."""
        now = time.monotonic()
        ends = [job.deadline - now for job in self._running if job.deadline is not None]
        return max(min(ends, default=self._deadline_s), 0.0)

    def _can_start(self, job: Job) -> bool:
        """Whether a queued job will find a thread; withdraws it if not."""
        if job not in self._queue:
            return False
        self._staff()
        if self._live:
            return True
        self._queue.remove(job)
        return False

    def _staff(self) -> None:
        """Start a thread if work waits and there is a place for one."""
        spare = self._live < self._places and len(self._threads) < 2 * self._places
        if len(self._queue) > self._idle and spare:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process may not have more threads: work with what there is
                return
            self._threads.add(thread)

    def _expire(self) -> None:
        """Abandon what is past its deadline, whoever waits for it, if anybody."""
        now = time.monotonic()
        late = [job for job in self._running if job.deadline is not None and job.deadline <= now]
        for job in late:
            job.abandoned = True
            self._running.discard(job)
            if job.thread is not None:
                self._hung.add(job.thread)
        if late:
            self._staff()
            self._changed.notify_all()

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                job.result = job.work()
            except Exception as error:
                job.error = error
            if not self._finish(job):
                return

    def _take(self) -> Job | None:
        """The next job; None when this thread should end."""
        with self._lock:
            self._idle += 1
            while not self._queue and not self._closed:
                self._offered.wait()
            self._idle -= 1
            if not self._queue:
                self._threads.discard(threading.current_thread())
                return None
            job = self._queue.popleft()
            job.deadline = time.monotonic() + self._deadline_s
            job.thread = threading.current_thread()
            self._running.add(job)
            return job

    def _finish(self, job: Job) -> bool:
        """Hand over what a job brought; False when this thread should end."""
        with self._lock:
            job.finished = True
            self._running.discard(job)
            stays = True
            if job.abandoned:
                stays = self._live < self._places
                self._hung.discard(threading.current_thread())
                if not stays:
                    self._threads.discard(threading.current_thread())
            self._changed.notify_all()
        if job.abandoned and job.discard is not None and job.error is None:
            job.discard(job.result)
        return stays


class Buffers:
    """Page-aligned memory that outlives a call, so that a late read can't touch its caller."""

    def __init__(self, spare: int) -> None:
        self._spare = spare
        self._lock = threading.Lock()
        self._free: dict[int, list[Bytes]] = {}

    def take(self, size: int) -> Bytes:
        """At least `size` bytes, content undefined."""
        room = max(BLOCK, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free.get(room)
            if free:
                return free.pop()
        return np.frombuffer(mmap.mmap(-1, room), dtype=np.uint8)

    def give(self, buffer: Bytes) -> None:
        """Give back what `take` gave; a few of each size are kept."""
        with self._lock:
            free = self._free.setdefault(buffer.size, [])
            if len(free) < self._spare:
                free.append(buffer)
