"""Log lines that can't flood: the store meets the same trouble once a page."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger("hicache_tiers")

_INTERVAL_S = 60.0


class Warner:
    """Warnings by kind, at most one a minute each, the number left out said in the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def warn(self, kind: str, message: str) -> None:
        """Log `message`, unless one of this kind was logged within the last minute."""
        now = time.monotonic()
        with self._lock:
            if now < self._next.get(kind, 0.0):
                self._silent[kind] = self._silent.get(kind, 0) + 1
                return
            self._next[kind] = now + _INTERVAL_S
            silent = self._silent.pop(kind, 0)
        logger.warning("%s%s", message, f" ({silent} more like it before)" if silent else "")

    def once(self, kind: str, message: str) -> None:
        """Log `message` the first time only."""
        with self._lock:
            if kind in self._next:
                return
            self._next[kind] = float("inf")
        logger.warning("%s", message)
