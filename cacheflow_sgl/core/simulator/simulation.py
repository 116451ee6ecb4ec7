"""A simulated server: requests, lanes and a clock, around the objects that the engine uses.

Each pipeline stage has one compute lane and one link a tier. Whenever a lane is free, the batch
policy names a request and its restore claims a piece; the piece ends when the world says so. As in
SGLang, prefill goes before decode, one request is prefilled at a time, and a decode step advances
all that run.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

from cacheflow_sgl.core.simulator.beliefs import Beliefs
from cacheflow_sgl.core.simulator.builder import Builder
from cacheflow_sgl.core.simulator.decodes import Decodes
from cacheflow_sgl.core.simulator.jobs import Job
from cacheflow_sgl.core.simulator.requests import Request, Residency
from cacheflow_sgl.core.simulator.result import Result, Served
from cacheflow_sgl.core.simulator.setup import Boundary, Engine, Setup
from cacheflow_sgl.core.simulator.stage import Stage
from cacheflow_sgl.core.simulator.world import World


class Simulation:
    """One run. Deterministic: the same arguments give the same result.

    With more than one stage only prefill is simulated: a request is done with its first token.
    """

    def __init__(
        self,
        world: World,
        setup: Setup,
        requests: Sequence[Request],
        residency: Residency,
        beliefs: Beliefs | None = None,
    ) -> None:
        """`ValueError` where layers and stages, or engine and stages, don't go together."""
        if world.compute.layers % setup.stages:
            raise ValueError(f"{world.compute.layers} layers can't be cut in {setup.stages} stages")
        if setup.stages > 1 and setup.engine in (Engine.CAKE, Engine.V1):
            raise ValueError(f"the engine {setup.engine} restores on one stage only")
        self.world = world
        self.setup = setup
        self.beliefs = Beliefs.exact(world) if beliefs is None else beliefs
        self.now_s = 0.0
        self.decodes = Decodes(world.decode_step_s)
        self._residency = residency
        self._builder = Builder(world, setup, self.beliefs)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = count()
        self._stages = [Stage(self, index) for index in range(setup.stages)]
        self._waiting: deque[Job] = deque()
        self._queued = 0
        self._running: set[int] = set()
        self._followers: dict[int, list[Request]] = defaultdict(list)
        self._served: list[Served] = []
        self._expected = len(requests)
        self._held_tokens = 0
        for request in requests:
            if request.after is None:
                self.after(request.at_s, partial(self._arrive, request))
            else:
                self._followers[request.after].append(request)

    def run(self, progress: Callable[[int], None] = lambda served: None) -> Result:
        """Serve everything; `progress` is told how many requests are done, now and then."""
        told = 0
        while self._events:
            self.now_s, _, event = heappop(self._events)
            event()
            if self._events and self._events[0][0] == self.now_s:
                continue  # what happens at the same time is known before anything is decided
            for stage in self._stages:
                stage.dispatch()
            if len(self._served) - told >= 100:
                told = len(self._served)
                progress(told)
        progress(len(self._served))
        missing = self._expected - len(self._served)
        if missing:
            raise RuntimeError(f"the simulation came to a halt with {missing} requests unserved")
        lanes = {name: lane for stage in self._stages for name, lane in stage.lanes()}
        self._served.sort(key=lambda served: served.rid)
        return Result(self._served, lanes, self.now_s)

    # -- the clock

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Let something happen that many seconds from now."""
        heappush(self._events, (self.now_s + seconds, next(self._sequence), event))

    @property
    def until_next_event_s(self) -> float:
        """Seconds until something happens by itself; infinite where nothing will."""
        return self._events[0][0] - self.now_s if self._events else math.inf

    # -- what stages tell

    def may_restore(self, job: Job, stage: int) -> bool:
        """Whether a stage may work on a prefix: in `OFF_SERIAL`, once the stage before is done."""
        serial = self.setup.boundary is Boundary.OFF_SERIAL
        return not stage or not serial or job.stages[stage - 1].restore is None

    def may_run(self, job: Job) -> bool:
        """Whether a request may be prefilled: it has a place among those that run, or gets one."""
        if not self.runs(job) and self._has_place(job):
            self._running.add(job.request.rid)
            self._held_tokens += job.tokens
        return self.runs(job)

    def _has_place(self, job: Job) -> bool:
        if len(self._running) >= self.setup.max_running:
            return False
        limit = self.setup.kv_tokens
        # One request may always run, or a prompt beyond the limit would wait for ever.
        return limit is None or not self._running or self._held_tokens + job.tokens <= limit

    def runs(self, job: Job) -> bool:
        """Whether it has a place among those that run."""
        return job.request.rid in self._running

    def changed(self, job: Job, stage: int) -> None:
        """Something has ended for a request on a stage."""
        for each in self._stages[stage : stage + 2]:
            each.refresh(job)
        last = job.stages[-1]
        done = last.restore is None and last.suffix_at == job.request.prompt_tokens
        if done and stage == len(self._stages) - 1 and not job.prefilled:
            self._first_token(job)

    def decoded(self, steps: int) -> None:
        """Decode steps have ended."""
        for job in self.decodes.advance(steps):
            self._done(job)

    # -- the life of a request

    def _arrive(self, request: Request) -> None:
        served = Served(request.rid, self.now_s, request.prompt_tokens, request.output_tokens)
        self._waiting.append(Job(request, served))
        self._queue()

    def _queue(self) -> None:
        while self._waiting and self._queued < self.setup.max_queued:
            job = self._waiting.popleft()
            self._queued += 1
            found = self._residency.find(job.request)
            job.served.device_tokens = found.device_tokens
            job.served.restored_s = self.now_s
            job.stages = self._builder.stages(job.request, found, self.now_s)
            for stage in self._stages:
                stage.add(job)

    def _first_token(self, job: Job) -> None:
        job.prefilled = True
        job.served.first_token_s = self.now_s
        self._queued -= 1
        self._residency.prefilled(job.request)
        if job.request.output_tokens > 1 and len(self._stages) == 1:
            self.decodes.add(job)
        else:
            self._done(job)
        self._queue()

    def _done(self, job: Job) -> None:
        job.served.done_s = self.now_s
        self._served.append(job.served)
        self._running.discard(job.request.rid)
        self._held_tokens -= job.tokens
        for stage in self._stages:
            stage.place_free()
        for request in self._followers.pop(job.request.rid, ()):
            self.after(request.at_s, partial(self._arrive, request))
