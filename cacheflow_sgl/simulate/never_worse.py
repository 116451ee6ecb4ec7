"""Whether `cacheflow` is ever worse than the better of recomputing and loading: a grid of cases.

Prompts of each length alone and in batches of mixed lengths, over four links, with costs that are
known exactly, that are 20% wrong, and a link that halves in mid-restore. What is wrong stays wrong:
nothing is learned, so the plans themselves must bear it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from random import Random

import msgspec

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.profiles import Profile, TableCost
from cacheflow_sgl.core.simulator.beliefs import Beliefs
from cacheflow_sgl.core.simulator.requests import Evicted, together
from cacheflow_sgl.core.simulator.result import Result
from cacheflow_sgl.core.simulator.setup import OWN_ENGINE, Engine, Setup
from cacheflow_sgl.core.simulator.simulation import Simulation
from cacheflow_sgl.core.simulator.world import GBPS, Link, World
from cacheflow_sgl.simulate.catalogue import named_profile
from cacheflow_sgl.simulate.runs import NETWORK_LATENCY_S, SINGLE_WAYS

GBPS_GRID = (1.0, 10.0, 40.0, 100.0)
LENGTHS = (512, 2048, 8192, 32768, 131072)
BATCHES = (1, 4, 16)
SUFFIX_TOKENS = 256
EXACT_LIMIT, WRONG_LIMIT = 1.02, 1.05
"""Most that `cacheflow` may take of the better single way's time, by how well costs are known."""
_WRONG = 0.2
_SPREAD = 2.0
"""Lengths of a mixed batch lie between the length over this, and times this."""


class NeverWorseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case. Ratios are over the better of recompute and load, each at its own best."""

    profile: str
    gbps: float
    prefix_tokens: int
    batch: int
    costs: str
    """`exact`, `compute -20% link +20%` and so on (what is believed of times), or `link halves`."""
    mean_ratio: float
    p99_ratio: float
    limit: float

    @property
    def worst(self) -> float:
        """The larger ratio over its limit: above 1 it is worse than it may be."""
        return max(self.mean_ratio, self.p99_ratio) / self.limit


def never_worse_rows(profiles: Sequence[str], workers: int) -> Iterator[list[NeverWorseRow]]:
    """All cases of each profile and link, as they are done; in processes where `workers` > 1."""
    tasks = list(product(profiles, GBPS_GRID))
    if workers == 1:
        yield from map(_rows_of, tasks)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _leave_interrupts_alone) as pool:
        yield from pool.map(_rows_of, tasks)


def task_count(profiles: Sequence[str]) -> int:
    """How many times `never_worse_rows` yields."""
    return len(profiles) * len(GBPS_GRID)


def _leave_interrupts_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _rows_of(task: tuple[str, float]) -> list[NeverWorseRow]:
    name, gbps = task
    _, profile = named_profile(name)
    cases = _Cases(name, profile, gbps)
    return [row for length, batch in product(LENGTHS, BATCHES) for row in cases.rows(length, batch)]


@dataclass
class _Cases:
    """The cases of one profile over one link."""

    name: str
    profile: Profile
    gbps: float

    def __post_init__(self) -> None:
        self._world = self._world_of(Link(NETWORK_LATENCY_S, self.gbps * GBPS))
        self._priors = {
            sign: TableCost(scaled(self.profile, 1 + sign * _WRONG)) for sign in (-1, 1)
        }

    def rows(self, length: int, batch: int) -> Iterator[NeverWorseRow]:
        """The same prompts under every kind of knowledge."""
        prompts = self._prompts(length, batch)
        exact = self._singles(self._world, prompts)
        for costs, beliefs in self._knowledge():
            limit = EXACT_LIMIT if costs == "exact" else WRONG_LIMIT
            ours = _run(self._world, BatchPolicyName.CACHEFLOW, prompts, beliefs)
            yield self._row(length, batch, costs, ours, exact, limit)
        halves_s = min(result.mean_ttft_s for result in exact) / 2
        rate = self.gbps * GBPS
        world = self._world_of(Link(NETWORK_LATENCY_S, rate, ((halves_s, rate / 2),)))
        ours = _run(world, BatchPolicyName.CACHEFLOW, prompts, Beliefs.exact(world))
        singles = self._singles(world, prompts)
        yield self._row(length, batch, "link halves", ours, singles, WRONG_LIMIT)

    def _knowledge(self) -> Iterator[tuple[str, Beliefs]]:
        yield "exact", Beliefs.exact(self._world)
        for compute, link in product((-1, 1), repeat=2):
            times = 1 + link * _WRONG
            believed = Link(NETWORK_LATENCY_S * times, self.gbps * GBPS / times)
            beliefs = Beliefs.fixed(self._priors[compute], [believed])
            yield f"compute {compute * _WRONG:+.0%} link {link * _WRONG:+.0%}", beliefs

    def _prompts(self, length: int, batch: int) -> list[int]:
        if batch == 1:
            return [length]
        draw, chunk = Random(f"{self.gbps} {length} {batch}"), self.profile.chunk
        chunks = [length / chunk * _SPREAD ** draw.uniform(-1, 1) for _ in range(batch)]
        return [chunk * max(1, round(count)) for count in chunks]

    def _world_of(self, link: Link) -> World:
        return World.of(self.profile, [link])

    def _singles(self, world: World, prompts: Sequence[int]) -> list[Result]:
        return [_run(world, policy, prompts, Beliefs.exact(world)) for policy in SINGLE_WAYS]

    def _row(
        self,
        length: int,
        batch: int,
        costs: str,
        ours: Result,
        singles: Sequence[Result],
        limit: float,
    ) -> NeverWorseRow:
        return NeverWorseRow(
            profile=self.name,
            gbps=self.gbps,
            prefix_tokens=length,
            batch=batch,
            costs=costs,
            mean_ratio=ours.mean_ttft_s / min(each.mean_ttft_s for each in singles),
            p99_ratio=ours.percentile_s(99) / min(each.percentile_s(99) for each in singles),
            limit=limit,
        )


def scaled(profile: Profile, factor: float) -> Profile:
    """A profile whose forwards all take `factor` times as long."""
    seconds = tuple(
        tuple(tuple(each * factor for each in by_layers) for by_layers in by_rows)
        for by_rows in profile.compute.seconds
    )
    compute = msgspec.structs.replace(profile.compute, seconds=seconds)
    return msgspec.structs.replace(profile, compute=compute)


def _run(
    world: World, policy: BatchPolicyName, prefixes: Sequence[int], beliefs: Beliefs
) -> Result:
    setup = Setup(engine=OWN_ENGINE.get(policy, Engine.STAIRCASE), policy=policy)
    requests = together([prefix + SUFFIX_TOKENS for prefix in prefixes])
    residency = Evicted(SUFFIX_TOKENS, world.chunk)
    return Simulation(world, setup, requests, residency, beliefs).run()
