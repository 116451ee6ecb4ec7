"""Rows of a simulation's table and JSON file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import groupby

import msgspec
import numpy as np
import numpy.typing as npt

from cacheflow_sgl import machine
from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.profiles import Profile
from cacheflow_sgl.core.simulator.result import Result
from cacheflow_sgl.simulate.runs import SINGLE_WAYS, Run
from cacheflow_sgl.simulate.workload import Prompts, Workload

_PACKAGES = ("cacheflow-sgl", "numpy")
_BEHIND_SHARE = 0.5
_BEHIND_S = 10.0
"""What is left after the last arrival of a server that keeps up: a few long prompts."""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """How and when rows were simulated. None of it decides what they say but the versions.

    Attributes:
        command: the command line.
        date: start, UTC.
        versions: of Python and the packages that decide.
        processor: of the machine that simulated.
        cpus: cores it could use.
    """

    command: list[str]
    date: str
    versions: dict[str, str]
    processor: str
    cpus: int

    @classmethod
    def now(cls) -> Environment:
        """The environment of a simulation that starts now."""
        return cls(
            command=machine.command_line(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=machine.versions(_PACKAGES),
            processor=machine.processor(),
            cpus=len(os.sched_getaffinity(0)),
        )


class Times(msgspec.Struct, frozen=True):
    """A distribution in simulated seconds; percentiles between two values are interpolated."""

    mean: float
    p50: float
    p90: float
    p99: float
    min: float
    max: float

    @classmethod
    def of(cls, seconds: npt.NDArray[np.float64]) -> Times:
        """The distribution of these seconds, at least one."""
        points = (float(point) for point in np.percentile(seconds, [50, 90, 99, 0, 100]))
        return cls(float(seconds.mean()), *points)


class Tokens(msgspec.Struct, frozen=True):
    """Where the KV of the prompts came from, in tokens.

    Attributes:
        device: found there.
        loaded: from the tier. A chunk of which some layers were loaded counts with their share.
        recomputed: all others, the new ones too.
    """

    device: int
    loaded: float
    recomputed: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one case, simulated.

    Attributes:
        simulated: whose costs it stands on: "on a modelled profile" or "on a measured profile".
        profile: name of the profile.
        hardware, model: those of the profile.
        link: the bandwidth or the profile's tier that the prefix is loaded over.
        bandwidth_gbps: of the link, 10^9 bits a second; each pipeline stage has one of its own.
        latency_s: of a load.
        workload: length and number of the prefixes ("8192 x 4"), or the trace's name.
        prefix_tokens: lengths of evicted prefixes, ascending; None for a trace.
        suffix_tokens: new tokens behind each; None for a trace.
        batch: prompts that arrive together; None for a trace.
        policy: batch policy.
        engine: how one prefix comes back.
        pp: pipeline stages.
        boundary: what later stages compute from; None for one stage.
        requests: served, all of them.
        ttft_s: time to first token.
        ratio_to_best_single: mean TTFT over that of `best_single`; None where neither was run.
        best_single: the better of the policies recompute and load on the same case.
        tokens: where the prompts' KV came from.
        compute_busy: share of `end_s` in which compute lanes worked, mean over stages.
        io_busy: the same of links.
        end_s: when everything was served, on the simulated clock.
        arrivals_s: seconds from the first to the last arrival at a time that the trace gives; None
            for given prefixes.
        behind_s: seconds from that last arrival to the last first token of such requests; None for
            given prefixes.
        ttft_each_s: of every request, in order of arrival.
    """

    simulated: str
    profile: str
    hardware: str
    model: str
    link: str
    bandwidth_gbps: float
    latency_s: float
    workload: str
    prefix_tokens: list[int] | None
    suffix_tokens: int | None
    batch: int | None
    policy: str
    engine: str
    pp: int
    boundary: str | None
    requests: int
    ttft_s: Times
    ratio_to_best_single: float | None
    best_single: str | None
    tokens: Tokens
    compute_busy: float
    io_busy: float
    end_s: float
    arrivals_s: float | None
    behind_s: float | None
    ttft_each_s: list[float]

    @property
    def overloaded(self) -> bool:
        """Whether requests came faster than they could be served, so that TTFT is a queue's."""
        if not self.arrivals_s or self.behind_s is None:
            return False  # all came at once: a batch
        return self.behind_s > max(_BEHIND_SHARE * self.arrivals_s, _BEHIND_S)


class SimulationReport(msgspec.Struct, frozen=True):
    """What the JSON file holds."""

    environment: Environment
    rows: list[Row]


def rows_of(results: Iterable[tuple[Run, Result]]) -> list[Row]:
    """A row for each result; those of one case must follow one another."""
    rows: list[Row] = []
    for _, group in groupby(results, lambda each: each[0].case):
        same = list(group)
        singles = [
            (result.mean_ttft_s, run.policy) for run, result in same if run.policy in SINGLE_WAYS
        ]
        best = min(singles, default=None)
        rows += [_row(run, result, best) for run, result in same]
    return rows


def simulated_on(profile: Profile) -> str:
    """Whose costs a simulation stands on."""
    return f"on a {profile.source} profile"


def _row(run: Run, result: Result, best: tuple[float, BatchPolicyName] | None) -> Row:
    case = run.case
    given = case.workload if isinstance(case.workload, Prompts) else None
    arrivals_s, behind_s = (None, None) if given else _arrivals(case.workload, result)
    return Row(
        simulated=simulated_on(case.profile),
        profile=case.name,
        hardware=case.profile.hardware,
        model=case.profile.model,
        link=case.link.name,
        bandwidth_gbps=case.link.gbps,
        latency_s=case.link.latency_s,
        workload=case.workload.name,
        prefix_tokens=sorted(set(given.prefix_tokens)) if given else None,
        suffix_tokens=given.suffix_tokens if given else None,
        batch=len(given.prefix_tokens) if given else None,
        policy=run.policy.value,
        engine=run.restored_by.value,
        pp=case.stages,
        boundary=case.boundary.value if case.stages > 1 else None,
        requests=len(result.served),
        ttft_s=Times.of(result.ttft_s),
        ratio_to_best_single=None if best is None else result.mean_ttft_s / best[0],
        best_single=None if best is None else best[1].value,
        tokens=_tokens(result, case.profile),
        compute_busy=_busy(result, "compute"),
        io_busy=_busy(result, "I/O"),
        end_s=result.end_s,
        arrivals_s=arrivals_s,
        behind_s=behind_s,
        ttft_each_s=result.ttft_s.tolist(),
    )


def _arrivals(workload: Workload, result: Result) -> tuple[float, float]:
    """`arrivals_s` and `behind_s`. Turns that wait for the turn before them are no load of a trace:
    they come as fast as they are served."""
    timed = {request.rid for request in workload.requests if request.after is None}
    served = [each for each in result.served if each.rid in timed]
    arrived = [each.arrived_s for each in served]
    last = max(arrived)
    return last - min(arrived), max(each.first_token_s for each in served) - last


def _tokens(result: Result, profile: Profile) -> Tokens:
    device = sum(served.device_tokens for served in result.served)
    loaded = sum(served.loaded_bytes for served in result.served) / profile.kv_bytes_per_token
    prompts = sum(served.prompt_tokens for served in result.served)
    return Tokens(device, loaded, prompts - device - loaded)


def _busy(result: Result, kind: str) -> float:
    """Mean share of the whole time in which the lanes of a kind worked."""
    busy = [lane.busy_s for name, lane in result.lanes.items() if name.startswith(kind)]
    return math.fsum(busy) / len(busy) / result.end_s
