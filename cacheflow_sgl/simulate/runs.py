"""Simulations to run, one after the other or in processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.profiles import Profile, TableCost
from cacheflow_sgl.core.simulator.result import Result
from cacheflow_sgl.core.simulator.setup import OWN_ENGINE, Boundary, Engine, Setup
from cacheflow_sgl.core.simulator.simulation import Simulation
from cacheflow_sgl.core.simulator.world import GBPS, Link, World
from cacheflow_sgl.core.thresholds import layer_threshold
from cacheflow_sgl.simulate.workload import Workload

SINGLE_WAYS = (BatchPolicyName.RECOMPUTE, BatchPolicyName.LOAD)
ON_ONE_STAGE = (Engine.CAKE, Engine.V1)
"""Engines that know no pipeline."""
NETWORK_LATENCY_S = 50e-6
"""Of a load over a link that is given by its bandwidth alone."""

_FEW_TOKENS = 10_000_000
"""Prompt tokens that are simulated sooner than processes start."""
_POLL_S = 0.2


class SimulationError(Exception):
    """Simulations could not go on; the message is one line."""


@dataclass(frozen=True)
class NamedLink:
    """How the tier is reached: latency of a load in seconds, then 10^9 bits a second."""

    name: str
    latency_s: float
    gbps: float

    @classmethod
    def network(cls, gbps: float) -> NamedLink:
        """A network of this bandwidth."""
        return cls(f"{gbps:g} Gbps", NETWORK_LATENCY_S, gbps)

    @classmethod
    def tier(cls, profile: Profile, name: str) -> NamedLink:
        """A tier of a profile; `KeyError` that lists the names where it has none of this one."""
        tier = profile.tier(name)
        return cls(name, tier.latency_s, tier.bytes_per_s / GBPS)


@dataclass(frozen=True)
class Case:
    """What policies are compared on."""

    name: str
    """Of the profile."""
    profile: Profile
    link: NamedLink
    workload: Workload
    stages: int = 1
    boundary: Boundary = Boundary.EXACT

    @property
    def chunk(self) -> int:
        """Tokens of a forward."""
        return self.workload.chunk(self.profile.chunk)

    def layer_threshold(self) -> int:
        """L_delta on the link, in tokens."""
        return layer_threshold(
            TableCost(self.profile),
            bandwidth_gbps=self.link.gbps,
            kv_bytes_per_token=self.profile.kv_bytes_per_token,
            chunk=self.chunk,
        )


@dataclass(frozen=True)
class Run:
    """One simulation. `engine` is that of the policies which bring none of their own."""

    case: Case
    policy: BatchPolicyName
    engine: Engine = Engine.STAIRCASE
    record: bool = False

    @property
    def requests(self) -> int:
        """How many are served."""
        return len(self.case.workload.requests)

    @property
    def restored_by(self) -> Engine:
        """The policy's own engine, or that of the run."""
        return OWN_ENGINE.get(self.policy, self.engine)

    def setup(self) -> Setup:
        """How the simulated server is run."""
        engine = self.restored_by
        return Setup(
            engine=engine,
            policy=self.policy,
            stages=self.case.stages,
            boundary=self.case.boundary,
            layer_threshold=self.case.layer_threshold() if engine is Engine.V1 else 0,
            kv_tokens=self.case.workload.kv_tokens,
            record=self.record,
        )

    def result(self, progress: Callable[[int], None] = lambda served: None) -> Result:
        """Run it; `progress` is told how many requests are done, now and then."""
        case = self.case
        link = Link(case.link.latency_s, case.link.gbps * GBPS)
        world = replace(World.of(case.profile, [link]), chunk=case.chunk)
        residency = case.workload.residency(case.chunk)
        return Simulation(world, self.setup(), case.workload.requests, residency).run(progress)


def runs_of(
    cases: Iterable[Case],
    policies: Sequence[BatchPolicyName],
    engines: Sequence[Engine],
    *,
    record: bool = False,
) -> list[Run]:
    """Every policy on every case with every engine; one with its own engine once."""
    return [
        Run(case, policy, engine, record)
        for case in cases
        for policy in policies
        for engine in (engines[:1] if policy in OWN_ENGINE else engines)
    ]


def run_all(
    runs: Sequence[Run], progress: Callable[[int], None] = lambda served: None
) -> Generator[tuple[int, Result], None, None]:
    """Results as they are found, in any order, each with the index of its run.

    They are the same in any number of processes. `progress` is told how many requests of all runs
    are done. Closing this ends what still runs.

    Raises:
        SimulationError: a process died.
    """
    processes = min(len(runs), len(os.sched_getaffinity(0)))
    tokens = sum(request.prompt_tokens for run in runs for request in run.case.workload.requests)
    if processes == 1 or tokens < _FEW_TOKENS:
        yield from _one_by_one(runs, progress)
    else:
        yield from _in_processes(runs, processes, progress)


def _one_by_one(
    runs: Sequence[Run], progress: Callable[[int], None]
) -> Generator[tuple[int, Result], None, None]:
    before = 0

    def tell(served: int) -> None:
        progress(before + served)

    for index, run in enumerate(runs):
        yield index, run.result(tell)
        before += run.requests


def _in_processes(
    runs: Sequence[Run], processes: int, progress: Callable[[int], None]
) -> Generator[tuple[int, Result], None, None]:
    context = get_context("spawn")
    served, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(processes, context, _begin, (served, stop))
    try:
        waiting = {pool.submit(_work, run): index for index, run in enumerate(runs)}
        while waiting:
            done, _ = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            progress(served.value)
            for future in done:
                yield waiting.pop(future), future.result()
    except BrokenProcessPool:
        raise SimulationError("a process of the simulation died; is memory short?") from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


# -- in a process of the pool

_served: Any = None
_stop: Any = None


class _Stopped(Exception):  # noqa: N818
    """Nobody waits for the result any more."""


def _begin(served: Any, stop: Any) -> None:
    global _served, _stop  # what the processes of a pool share reaches them only this way
    _served, _stop = served, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command itself tells when to stop


def _work(run: Run) -> Result:
    before = 0

    def tell(served: int) -> None:
        nonlocal before
        if _stop.is_set():
            raise _Stopped
        with _served.get_lock():
            _served.value += served - before
        before = served

    tell(0)
    return run.result(tell)
