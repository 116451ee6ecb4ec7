"""The I/O lane: one thread that loads private slots from the host, tail first.

It claims from the restores in the order they began, since loads in another order starve the request
that is computed now (`core/pointers.py` says who may load what). It touches no allocator, tree or
row: only private slots that it has claimed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.report import Interval

from .restores import Restore

logger = logging.getLogger(__name__)

_MOST_FAILED_LOADS = 3
_POLL_S = 0.01
"""How often a lane without anything to claim looks again; a returned claim makes room."""
_FENCE_POLL_S = 0.001
"""How often it looks whether a restore that may not write yet now may."""


class Loader:
    """The thread, and the restores it serves.

    Args:
        transfer: copies the claimed tokens of a restore and returns when they have landed; gives
            the bytes moved.
        claim_size: tokens the next load of a restore should take.
        observe: told of every load: bytes, seconds.
    """

    def __init__(
        self,
        transfer: Callable[[Restore, Span], int],
        claim_size: Callable[[Restore], int],
        observe: Callable[[int, float], None],
    ) -> None:
        self._transfer = transfer
        self._claim_size = claim_size
        self._observe = observe
        self._changed = threading.Condition()
        self._restores: list[Restore] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, restore: Restore) -> None:
        """Load for `restore` from now on, after those submitted before it."""
        with self._changed:
            self._restores.append(restore)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="cacheflow-io", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def withdraw(self, restore: Restore) -> None:
        """Load no more for `restore`; returns once nothing writes to its slots."""
        restore.pointers.stop_loading()
        with self._changed:
            if restore in self._restores:
                self._restores.remove(restore)
        while not restore.pointers.wait_for_loads(1.0):
            if self._thread is None or not self._thread.is_alive():
                return  # nothing is left that could write

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for what only a load that lands or fails can bring about; whether it came about."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def close(self) -> None:
        """End the thread; loads under way end first."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            restore, claim = work
            self._load(restore, claim)
            with self._changed:
                self._changed.notify_all()

    def _next(self) -> tuple[Restore, Span] | None:
        """The next claim; waits for one. None once closed."""
        with self._changed:
            while not self._closed:
                for restore in self._restores:
                    claim = self._claim(restore)
                    if claim is not None:
                        return restore, claim
                self._changed.wait(self._patience_s())
            return None

    def _patience_s(self) -> float | None:
        if any(restore.fence for restore in self._restores):
            return _FENCE_POLL_S
        return _POLL_S if self._restores else None

    def _claim(self, restore: Restore) -> Span | None:
        try:
            if not restore.may_write():
                return None
            return restore.pointers.claim_load(self._claim_size(restore))
        except Exception:
            # The thread serves others, too; this one is left to compute.
            logger.exception("cacheflow: no load of %s could be sized", restore.req.rid)
            restore.pointers.stop_loading()
            return None

    def _load(self, restore: Restore, claim: Span) -> None:
        try:
            began_s = time.perf_counter()
            restore.loading = (claim, began_s)
            restore.first_load_s = restore.first_load_s or began_s
            nbytes = self._transfer(restore, claim)
            ended_s = time.perf_counter()
            self._observe(nbytes, ended_s - began_s)
        except Exception as error:
            self._note_failure(restore, claim, error)
            return
        finally:
            restore.loading = None
        restore.io_lane.add(Interval(began_s, ended_s), claim)
        restore.loaded_bytes += nbytes
        restore.pointers.landed(claim)
        if restore.probe:
            restore.pointers.stop_loading()

    def _note_failure(self, restore: Restore, claim: Span, error: Exception) -> None:
        restore.failed_loads += 1
        logger.warning(
            "cacheflow: tokens %d-%d of %s could not be loaded (%s: %s); they are recomputed",
            claim.start,
            claim.stop,
            restore.req.rid,
            type(error).__name__,
            error,
        )
        restore.pointers.failed(claim)
        if restore.failed_loads >= _MOST_FAILED_LOADS:
            restore.pointers.stop_loading()


def record_fence(device_module: Any, *streams: Any) -> tuple[Any, ...]:
    """Events after all that `streams` have been given so far.

    A page that was freed may still be written by a forward that was launched before, and forwards
    and loads are not ordered: so the first load of a restore waits for these, which are recorded
    when its slots are allocated.
    """
    events = []
    for stream in streams:
        event = device_module.Event()
        event.record(stream)
        events.append(event)
    return tuple(events)
