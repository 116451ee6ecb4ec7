"""`cacheflow simulate`: what a policy would gain on some hardware, without having it."""

from __future__ import annotations

import enum
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.profiles import Profile, ProfileError
from cacheflow_sgl.core.simulator.result import Result
from cacheflow_sgl.core.simulator.setup import OWN_ENGINE, Boundary, Engine
from cacheflow_sgl.files import write_atomically
from cacheflow_sgl.progress import progress_bar
from cacheflow_sgl.replay import ReplayError, load_trace
from cacheflow_sgl.replay.load import TraceFormat
from cacheflow_sgl.replay.prompts import BLOCK_TOKENS
from cacheflow_sgl.simulate.catalogue import named_profile, profile_names
from cacheflow_sgl.simulate.plot import plot_rows
from cacheflow_sgl.simulate.rows import Environment, SimulationReport, rows_of
from cacheflow_sgl.simulate.runs import (
    ON_ONE_STAGE,
    Case,
    NamedLink,
    Run,
    SimulationError,
    run_all,
    runs_of,
)
from cacheflow_sgl.simulate.show import label, print_rows
from cacheflow_sgl.simulate.timeline import timeline as timeline_of
from cacheflow_sgl.simulate.traces import BYTES_PER_TOKEN, Arrival, holds_text, requests_of
from cacheflow_sgl.simulate.workload import Trace, Workload, prompts

from . import simulate_reports as reports
from .input import interruptible, numbers
from .output import JsonOption, console, error_console, fail, write_json
from .replay import check_outputs, warn_skipped

T = TypeVar("T", int, float)
N = TypeVar("N", bound=enum.StrEnum)

_FOR_TRACES = ("format", "arrival", "speed", "requests", "device_tokens", "host_tokens")
_FOR_PROMPTS = ("prefix_tokens", "suffix_tokens", "batch", "mixed", "seed")
_ENGINES = (Engine.STAIRCASE, Engine.V1, Engine.RECOMPUTE, Engine.LOAD)
"""What `--engine` takes."""
_WIDTH = 80
"""Columns of a list of names."""


def simulate(
    context: typer.Context,
    profile: Annotated[
        str | None,
        typer.Option(help="Name of a profile that comes with the package, or a file; a list."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(help=f"Rows to simulate, of {', '.join(BatchPolicyName)}; cake on one stage."),
    ] = "recompute,load,cake,cacheflow",
    bandwidth_gbps: Annotated[
        str, typer.Option(help="Link that prefixes are loaded over, 10^9 bits a second; a list.")
    ] = "10",
    tier: Annotated[
        str | None,
        typer.Option(help="Instead of a bandwidth: tiers of the profile (host, disk, ..); a list."),
    ] = None,
    prefix_tokens: Annotated[
        str, typer.Option(help="Evicted tokens of a prompt, of which whole chunks return; a list.")
    ] = "8192",
    suffix_tokens: Annotated[int, typer.Option(help="New tokens behind them.")] = 256,
    batch: Annotated[str, typer.Option(help="Prompts that arrive together; a list.")] = "1",
    mixed: Annotated[
        bool, typer.Option("--mixed", help="All the prefix lengths in each batch.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the order of mixed lengths.")] = 0,
    trace: Annotated[
        str | None,
        typer.Option(help="Instead of given prefixes: a trace, as `cacheflow replay` takes it."),
    ] = None,
    format: Annotated[
        TraceFormat, typer.Option(help="Format of the trace; auto looks at its content.")
    ] = "auto",
    arrival: Annotated[
        Arrival,
        typer.Option(
            help="trace: at the trace's times; closed: a turn when the one before it has ended."
        ),
    ] = "trace",
    speed: Annotated[float, typer.Option(help="Arrival times pass this much faster.")] = 1.0,
    requests: Annotated[
        int | None, typer.Option(help="Only the trace's first so many requests.")
    ] = None,
    device_tokens: Annotated[
        int,
        typer.Option(help="KV tokens of the device's cache, and of the requests that run at once."),
    ] = 200000,
    host_tokens: Annotated[
        int | None,
        typer.Option(help="KV tokens that the tier behind the link holds.", show_default="no end"),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="How fifo, longest and cacheflow restore one prefix; a list. "
            "v1: by tokens, or by layers if short, as in the first CacheFlow paper; "
            "recompute, load: a single way, so that only the order of serving is theirs."
        ),
    ] = "staircase",
    pp: Annotated[
        str, typer.Option(help="Pipeline stages, each with a link of its own; a list.")
    ] = "1",
    boundary: Annotated[
        str,
        typer.Option(
            help="What later stages compute a prefix from; a list. exact: stored activations; "
            "off: what the stage before computes; off_serial: as off, one stage after the other."
        ),
    ] = "exact",
    paper: Annotated[
        bool, typer.Option("--paper", help="Instead: the published figures beside simulated ones.")
    ] = False,
    never_worse: Annotated[
        bool,
        typer.Option(
            "--never-worse",
            help="Instead: a grid of cases, cacheflow against the better of recompute and load.",
        ),
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Write the table of --paper.")
    ] = None,
    json: JsonOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", help="Draw TTFT: its distribution for a trace, else its mean."
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Write what every lane did, for ui.perfetto.dev; of one row."
        ),
    ] = None,
) -> None:
    """Simulate what a policy would gain: no GPU, no server.

    A cost profile says what computing and loading take; the rest is the same code
    that decides in the engine. Lists take commas, and every combination is a row.
    The figures are simulated ones, and as good as the profile: a modelled
    profile was never measured. The same command gives the same rows.

    Exit code: 0 fine, 1 --never-worse found a case that is, 2 could not start
    or go on, 130 interrupted. What was simulated is reported in any case.

    Example: a recorded trace, and the distribution of TTFT.

        cacheflow simulate --profile h100-qwen3-8b --plot t.png \\
            --trace t.jsonl --speed 0.1

    Example: prefixes of three lengths over 10 Gbps.

        cacheflow simulate --profile a100-qwen3-8b --prefix-tokens 2048,8192,32768

    Example: what comes from the order of serving, and what from restoring.

        cacheflow simulate --profile a100-qwen3-8b --mixed --batch 12 \\
            --prefix-tokens 2048,8192,32768 \\
            --policy load,fifo,cacheflow --engine load,staircase

    Example: one prefix and 4 at once, from the profile's disk and its network.

        cacheflow simulate --profile a100-qwen3-8b --batch 1,4 --tier disk,remote

    Example: the picture of a restore, for ui.perfetto.dev.

        cacheflow simulate --profile h100-qwen3-8b --policy cake --timeline t.json

    Example: the published figures; and whether a split is ever the worse choice.

        cacheflow simulate --paper --markdown paper.md
        cacheflow simulate --never-worse --profile h100-qwen3-8b,l40s-llama-3.1-8b
    """
    try:
        if paper or never_worse:
            _refuse_others(context, paper=paper, never_worse=never_worse)
            check_outputs(json, markdown, plot=None)
            reports.paper(json, markdown) if paper else reports.never_worse(profile, json)
            return
        _refuse(context, ("markdown",), "goes only with --paper")
        if trace is None:
            _refuse(context, _FOR_TRACES, "goes only with --trace")
        else:
            _refuse(context, _FOR_PROMPTS, "goes not with --trace")
        if tier is not None:
            _refuse(context, ("bandwidth_gbps",), "goes not with --tier")
        profiles = _profiles(profile)
        links = _links(profiles, bandwidth_gbps, tier)
        pipelines = _pipelines(profiles, pp, boundary)
        if all(stages == 1 for stages, _ in pipelines):
            _refuse(context, ("boundary",), "goes only with --pp 2 or more")
        check_outputs(json, timeline, plot=plot)
        workloads: Sequence[Workload]
        if trace is None:
            workloads = _prompts(profiles, prefix_tokens, suffix_tokens, batch, mixed, seed)
        else:
            workloads = [
                _trace(trace, format, arrival, speed, requests, device_tokens, host_tokens)
            ]
        cases = [
            Case(name, each, link, workload, *pipeline)
            for name, each in profiles.items()
            for pipeline in pipelines
            for link, workload in product(links[name], workloads)
        ]
        policies = _names("--policy", policy, BatchPolicyName)
        if not _given(context, "policy") and any(case.stages > 1 for case in cases):
            policies.remove(BatchPolicyName.CAKE)  # it knows no stages
        if all(name in OWN_ENGINE for name in policies):
            _refuse(context, ("engine",), "goes only with --policy fifo, longest or cacheflow")
        engines = _names("--engine", engine, _ENGINES)
        runs = runs_of(cases, policies, engines, record=timeline is not None)
        _refuse_stages(runs)
        if timeline is not None and len(runs) > 1:
            raise ValueError(f"--timeline draws one row, and these are {len(runs)}: ask for one")
    except (ProfileError, ReplayError, ValueError) as error:
        fail(_listed(str(error)))
    _simulate(runs, json, plot, timeline)


def _simulate(
    runs: Sequence[Run], json: Path | None, plot: Path | None, timeline: Path | None
) -> None:
    """Run, print and write."""
    environment = Environment.now()
    results: dict[int, Result] = {}
    problem: tuple[str, int] | None = None
    try:
        with progress_bar(error_console) as progress:
            task = progress.add_task("simulate", total=sum(run.requests for run in runs))
            found = run_all(runs, lambda served: progress.update(task, completed=served))
            with closing(found), interruptible():
                results.update(found)
    except SimulationError as error:
        problem = str(error), 2
    except KeyboardInterrupt:
        problem = f"interrupted; {len(results)} of {len(runs)} rows were simulated", 130
    rows = rows_of([(runs[at], results[at]) for at in sorted(results)])
    if rows:
        print_rows(rows, console)
        write_json(json, SimulationReport(environment, rows))
        try:
            if plot is not None:
                plot_rows(rows, plot)
            if timeline is not None:
                title = f"{rows[0].profile} {label(rows[0])} simulated {rows[0].simulated}"
                write_atomically(timeline, timeline_of(results[0], title))
        except (ReplayError, OSError) as error:
            fail(str(error))
    if problem:
        fail(*problem)


# -- from options to what is simulated; ValueError, with one line, where they are wrong


def _refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Refuse options that would change nothing."""
    for name in names:
        if _given(context, name):
            raise ValueError(f"--{name.replace('_', '-')} {why}")


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_others(context: typer.Context, *, paper: bool, never_worse: bool) -> None:
    """A report of its own takes few options."""
    if paper and never_worse:
        raise ValueError("--paper and --never-worse are two reports: ask for one")
    option, wanted = ("paper", "markdown") if paper else ("never-worse", "profile")
    takes = {option.replace("-", "_"), wanted, "json"}
    _refuse(
        context, [name for name in context.params if name not in takes], f"goes not with --{option}"
    )


def _refuse_stages(runs: Sequence[Run]) -> None:
    """Refuse a pipeline to an engine that knows none."""
    for run in runs:
        stages, engine = run.case.stages, run.restored_by
        if stages > 1 and engine in ON_ONE_STAGE:
            own = engine in OWN_ENGINE.values()
            option, names = ("--policy", BatchPolicyName) if own else ("--engine", _ENGINES)
            remain = ", ".join(name for name in names if name not in ON_ONE_STAGE)
            raise ValueError(f"--pp {stages}: {engine} is for one stage; {option} may be {remain}")


def _listed(message: str) -> str:
    """With names on lines of their own where there are too many for one."""
    head, there_are, names = message.partition("; there are: ")
    if not there_are or len(message) < _WIDTH:
        return message
    lines = textwrap.wrap(names, _WIDTH - 2, break_on_hyphens=False)
    return "\n  ".join((f"{head}; there are:", *lines))


def _profiles(names: str | None) -> dict[str, Profile]:
    if not names:
        raise ValueError(f"--profile is missing; there are: {', '.join(profile_names())}")
    return dict(map(named_profile, names.split(",")))


def _links(
    profiles: dict[str, Profile], bandwidth_gbps: str, tiers: str | None
) -> dict[str, list[NamedLink]]:
    """The links of each profile, by its name."""
    if tiers is None:
        links = [
            NamedLink.network(gbps) for gbps in _positive("--bandwidth-gbps", bandwidth_gbps, float)
        ]
        return dict.fromkeys(profiles, links)
    try:
        return {
            name: [NamedLink.tier(profile, tier) for tier in dict.fromkeys(tiers.split(","))]
            for name, profile in profiles.items()
        }
    except KeyError as error:
        raise ValueError(f"--tier: {error.args[0]}") from None


def _pipelines(profiles: dict[str, Profile], pp: str, boundary: str) -> list[tuple[int, Boundary]]:
    """Stages and boundaries; one stage has no boundary, and so one row."""
    boundaries = _names("--boundary", boundary, Boundary)
    pipelines = []
    for stages in _positive("--pp", pp, int):
        for name, profile in profiles.items():
            if profile.layers % stages:
                raise ValueError(f"--pp: {name} has {profile.layers} layers, not cut in {stages}")
        pipelines += [(stages, each) for each in (boundaries if stages > 1 else boundaries[:1])]
    return pipelines


def _prompts(
    profiles: dict[str, Profile],
    prefix_tokens: str,
    suffix_tokens: int,
    batch: str,
    mixed: bool,
    seed: int,
) -> list[Workload]:
    lengths = _positive("--prefix-tokens", prefix_tokens, int)
    chunk = max(profile.chunk for profile in profiles.values())
    if min(lengths) < chunk:
        raise ValueError(f"--prefix-tokens: {min(lengths)} is less than a chunk of {chunk}")
    _at_least_one(suffix_tokens=suffix_tokens)
    batches = _positive("--batch", batch, int)
    if mixed and min(batches) < len(lengths):
        raise ValueError(
            f"--mixed: a batch of {min(batches)} has no room for {len(lengths)} lengths; "
            f"ask for --batch {len(lengths)} or more"
        )
    return [*prompts(lengths, suffix_tokens, batches, mixed=mixed, seed=seed)]


def _trace(
    path: str,
    format: TraceFormat,
    arrival: Arrival,
    speed: float,
    requests: int | None,
    device_tokens: int,
    host_tokens: int | None,
) -> Trace:
    if not 0 < speed < math.inf:
        raise ValueError(f"--speed is {speed}; it must be above 0")
    _at_least_one(requests=requests, device_tokens=device_tokens, host_tokens=host_tokens)
    try:
        loaded = load_trace(path, format).first(requests=requests)
    except ReplayError as error:
        raise ValueError(f"--trace: {error}") from None
    warn_skipped(loaded)
    text = f" (text, {BYTES_PER_TOKEN} bytes a token)" if holds_text(loaded) else ""
    return Trace(
        name=loaded.name + text,
        requests=requests_of(loaded, arrival, speed),
        block_tokens=BLOCK_TOKENS,
        device_tokens=device_tokens,
        tier_tokens=host_tokens,
    )


def _names(option: str, text: str, kind: Iterable[N]) -> list[N]:
    """The names of a list with commas, each once."""
    known = {each.value: each for each in kind}
    for name in text.split(","):
        if name not in known:
            raise ValueError(f"{option}: {name!r} is none of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(text.split(","))]


def _positive(option: str, text: str, kind: Callable[[str], T]) -> list[T]:
    """The numbers of a list with commas, each once."""
    values = numbers(option, text, kind)
    for value in values:
        if not 0 < value < math.inf:
            raise ValueError(f"{option}: {value} is not above 0")
    return list(dict.fromkeys(values))


def _at_least_one(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
