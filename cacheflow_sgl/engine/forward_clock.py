"""Seam: how long each forward takes, which is what the compute lane's cost is learned from.

A forward is timed around `TpModelWorker.forward_batch_generation`: by the wall clock where that
returns when the work is done (CPU), by device events where it returns when the work is queued.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.report import Interval

ATTRIBUTE = "cacheflow_clock"
"""Where a worker keeps the clock of its scheduler's cache."""


@dataclass
class Forward:
    """One extend forward.

    Attributes:
        rows: what it computed, by request id.
        launched_s: when it was launched (`time.perf_counter`).
        interval: when the device ran it; None while it runs.
    """

    rows: list[tuple[str, Span]]
    launched_s: float
    interval: Interval | None = None
    _events: tuple[Any, Any] | None = None

    @property
    def tokens(self) -> int:
        """Rows of all requests."""
        return sum(span.tokens for _, span in self.rows)

    @property
    def offset(self) -> int:
        """The offset at which one request with as many rows attends to as much context."""
        context = sum(span.tokens * (span.start + span.tokens / 2) for _, span in self.rows)
        return max(0, round(context / self.tokens - self.tokens / 2))


@dataclass
class ForwardClock:
    """Times the forwards of one scheduler process.

    Owned by the radix cache; the forward hook adds, the scheduler thread takes.
    """

    timing_event: Callable[[], Any] | None
    """Makes a device event that measures time; None where a forward returns when it is done."""
    _running: deque[Forward] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, forward: Callable[[], Any], rows: list[tuple[str, Span]]) -> Any:
        """Call `forward` and time it."""
        timed = Forward(rows, time.perf_counter())
        if self.timing_event is None:
            with self._lock:
                self._running.append(timed)
            try:
                return forward()
            finally:
                timed.interval = Interval(timed.launched_s, time.perf_counter())
        start, stop = self.timing_event(), self.timing_event()
        start.record()
        result = forward()
        stop.record()
        timed._events = (start, stop)
        with self._lock:
            self._running.append(timed)
        return result

    def take_finished(self) -> list[Forward]:
        """The forwards that have ended since the last call, oldest first."""
        finished = []
        with self._lock:
            while self._running and _has_ended(self._running[0]):
                finished.append(self._running.popleft())
        return finished

    def running(self) -> list[Forward]:
        """The forwards that were launched and have not ended, oldest first."""
        with self._lock:
            return list(self._running)


def _has_ended(forward: Forward) -> bool:
    if forward.interval is None and forward._events is not None:
        start, stop = forward._events
        if stop.query():
            now = time.perf_counter()  # device events tell how long, not when
            forward.interval = Interval(now - start.elapsed_time(stop) / 1000, now)
    return forward.interval is not None


def around_forward(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kw: Any
) -> Any:
    """Around `TpModelWorker.forward_batch_generation`; `batch` is a `ScheduleBatch`."""
    clock: ForwardClock | None = getattr(worker, ATTRIBUTE, None)
    if clock is None or batch is None or not batch.forward_mode.is_extend():
        return original(worker, batch, *args, **kw)
    rows = [
        (req.rid, Span(prefix, prefix + extend))
        for req, prefix, extend in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=False
        )
        if extend
    ]
    if not rows:
        return original(worker, batch, *args, **kw)
    return clock.run(lambda: original(worker, batch, *args, **kw), rows)
