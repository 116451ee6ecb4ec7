"""Requests that decode: all take part in each step, and leave after their own number of steps."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from cacheflow_sgl.core.simulator.jobs import Job


class Decodes:
    """The running batch of a server."""

    def __init__(self, step_s: Callable[[int], float]) -> None:
        """`step_s`: seconds of a step over so many tokens of context."""
        self._step_s = step_s
        self._steps = 0
        self._running: list[tuple[int, int, Job]] = []
        """(step after which it leaves, id, request)."""
        self._context_tokens = 0

    def __len__(self) -> int:
        return len(self._running)

    def add(self, job: Job) -> None:
        """A request that has its first token and wants more."""
        steps = self._steps + job.request.output_tokens - 1
        heappush(self._running, (steps, job.request.rid, job))
        self._context_tokens += job.request.prompt_tokens

    def steps_within(self, seconds: float) -> tuple[int, float]:
        """How many steps to run at once, and how long they take; nobody leaves before the last.

        At least one, and no more than `seconds` hold. Context counts as it is at the start.
        """
        step_s = self._step_s(self._context_tokens)
        until_one_leaves = self._running[0][0] - self._steps
        room = seconds / step_s if step_s else until_one_leaves
        steps = max(1, int(min(room, until_one_leaves)))
        return steps, steps * step_s

    def advance(self, steps: int) -> list[Job]:
        """Let steps pass; those that have all their tokens now."""
        self._steps += steps
        self._context_tokens += steps * len(self._running)
        left = []
        while self._running and self._running[0][0] <= self._steps:
            job = heappop(self._running)[2]
            self._context_tokens -= job.request.prompt_tokens + job.request.output_tokens - 1
            left.append(job)
        return left
