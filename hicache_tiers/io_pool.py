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


class Deadline:
    """The moment by which a call must end, whatever it still waits for."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, 0.0 once it has passed."""
        return max(self._at - time.monotonic(), 0.0)

    def reserving(self, share: float) -> Deadline:
        """An earlier one, which leaves this share of the seconds for what comes after."""
        earlier = Deadline(self.seconds * (1 - share))
        earlier._at = self._at - self.seconds * share
        return earlier


class Job(Generic[T]):
    """A piece of work handed to a pool. All fields belong to the pool's lock."""

    def __init__(self, work: Callable[[], T], discard: Callable[[T], None] | None) -> None:
        self.work = work
        self.discard = discard
        self.thread: threading.Thread | None = None  # this and `hung_at` are set at its start
        self.hung_at: float | None = None
        self.finished = False
        self.abandoned = False  # its caller has given up
        self.result: T | None = None
        self.error: Exception | None = None


class IoPool:
    """Daemon threads that do blocking calls for callers who can't wait for ever.

    A caller waits until its own deadline; then what it had queued is withdrawn, and what is under
    way is abandoned: the late result goes to `discard`. A thread that is at one job for longer
    than `hung_s` counts as hung and is replaced, up to as many hung threads as the pool has
    places; once it comes back it takes work again where a place is free.
    """

    def __init__(self, name: str, threads: int, hung_s: float) -> None:
        self._name = name
        self._places = threads
        self._hung_s = hung_s
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

    def wait(self, job: Job[T], deadline: Deadline) -> T:
        """The result of `job`, or its exception; `HungError` where it isn't there in time."""
        with self._lock:
            while not job.finished:
                if not deadline.left:
                    self._give_up(job)
                    raise HungError(f"{self._name}: no answer within {deadline.seconds:g} s")
                self._note_hung()
                if job.thread is None and not self._can_start(job):
                    raise HungError(f"{self._name}: all threads hang, or the store is closed")
                self._changed.wait(min(deadline.left, self._until_next_hung()))
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]

    def call(
        self, work: Callable[[], T], deadline: Deadline, discard: Callable[[T], None] | None = None
    ) -> T:
        """Do `work` on a thread of the pool and wait for it."""
        return self.wait(self.submit(work, discard), deadline)

    def close(self, deadline: Deadline) -> None:
        """Finish what is queued, as far as time allows, then end all threads that are free."""
        with self._lock:
            self._closed = True
            self._offered.notify_all()
            while deadline.left and (self._running or (self._queue and self._live)):
                self._note_hung()
                self._changed.wait(min(deadline.left, self._until_next_hung()))
            self._queue.clear()
            self._changed.notify_all()
            ending = self._threads - self._hung - {job.thread for job in self._running}
        for thread in ending:
            thread.join()

    @property
    def _live(self) -> int:
        return len(self._threads) - len(self._hung)

    def _until_next_hung(self) -> float:
        """Seconds; what starts after this can't count as hung before `hung_s` has passed."""
        now = time.monotonic()
        ends = [job.hung_at - now for job in self._running if job.hung_at is not None]
        return max(min(ends, default=self._hung_s), 0.0)

    def _give_up(self, job: Job) -> None:
        """Withdraw a job that has not started, abandon one that has."""
        job.abandoned = True
        if job in self._queue:
            self._queue.remove(job)

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

    def _note_hung(self) -> None:
        """Replace threads that are too long at one job, whoever waits for it, if anybody."""
        now = time.monotonic()
        late = [job for job in self._running if job.hung_at is not None and job.hung_at <= now]
        for job in late:
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
            job.hung_at = time.monotonic() + self._hung_s
            job.thread = threading.current_thread()
            self._running.add(job)
            return job

    def _finish(self, job: Job) -> bool:
        """Hand over what a job brought; False when this thread should end."""
        thread = threading.current_thread()
        with self._lock:
            job.finished = True
            self._running.discard(job)
            stays = True
            if thread in self._hung:
                stays = self._live < self._places
                self._hung.discard(thread)
                if not stays:
                    self._threads.discard(thread)
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
