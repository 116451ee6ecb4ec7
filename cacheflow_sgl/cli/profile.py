"""`cacheflow profile`: what computing and loading KV cost, modelled or measured, in a file."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Group
from rich.table import Table

from cacheflow_sgl.bench.profile import ProfileOptions, measure_profile
from cacheflow_sgl.bench.protocol import BenchError
from cacheflow_sgl.client import ServerError
from cacheflow_sgl.core.profiles import Profile, ProfileError, TableCost, encode, load_profile
from cacheflow_sgl.core.roofline import GPUS, MODELS, modelled_profile
from cacheflow_sgl.core.thresholds import MOST_TOKENS
from cacheflow_sgl.files import write_atomically

from .input import interruptible
from .output import JsonOption, console, fail, write_json
from .serve import detect_hardware

app = typer.Typer(
    help="Write and show what computing and loading KV cost.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def model(
    gpu: Annotated[str | None, typer.Option(help=f"One of {', '.join(GPUS)}.")] = None,
    model: Annotated[str | None, typer.Option(help=f"One of {', '.join(MODELS)}.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it.")] = None,
    all_in: Annotated[
        Path | None, typer.Option("--all", metavar="DIR", help="Write every pair into DIR.")
    ] = None,
) -> None:
    """Write the profile of a model on a GPU, modelled by a roofline.

    Example: cacheflow profile model --gpu h100 --model qwen3-8b --out h100.json

    Example: all GPUs and models, under their names.

        cacheflow profile model --all profiles
    """
    if all_in is not None:
        if gpu or model or out:
            fail("--all takes no --gpu, --model or --out: it writes every pair")
        for gpu_name in GPUS:
            for model_name in MODELS:
                _write(all_in / f"{gpu_name}-{model_name}.json", _modelled(gpu_name, model_name))
        return
    if not (gpu and model and out):
        fail("--gpu, --model and --out belong together; or give --all DIR")
    if gpu not in GPUS:
        fail(f"--gpu {gpu} is not known; it can be: {', '.join(GPUS)}")
    if model not in MODELS:
        fail(f"--model {model} is not known; it can be: {', '.join(MODELS)}")
    _write(out, _modelled(gpu, model))


@app.command()
def measure(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")],
    model: Annotated[
        str | None, typer.Option(help="Directory or name; on a CPU a tiny one by default.")
    ] = None,
    longest: Annotated[int, typer.Option(help="Last start of a forward.")] = 4096,
    chunk: Annotated[int, typer.Option(help="Most rows of a forward.")] = 512,
    page: Annotated[int, typer.Option(help="Tokens of a KV page.")] = 64,
    repeats: Annotated[int, typer.Option(help="Rounds; their medians count.")] = 5,
    seed: Annotated[int, typer.Option(help="Of prompts and weights.")] = 0,
) -> None:
    """Measure the profile of a model on this machine, in a server of its own.

    Times forwards of several sizes at several starts, decode steps, and loads
    from the host. Disk and network are left out: give their rates where a
    profile is used.

    Exit code: 0 fine, 2 could not start or go on, 130 interrupted.

    Example: cacheflow profile measure --out cpu-tiny-qwen3.json
    """
    try:
        options = ProfileOptions(
            model=model, longest=longest, chunk=chunk, page=page, repeats=repeats, seed=seed
        )
    except ValueError as error:
        fail(str(error))
    on_cpu = detect_hardware().accelerator is None
    if model is None and not on_cpu:
        fail("--model is missing; only on a CPU there is one by default")
    try:
        with interruptible():
            profile = measure_profile(options, on_cpu=on_cpu)
    except (BenchError, ServerError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; nothing was written", 130)
    _write(out, profile)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile.")],
    json: JsonOption = None,
) -> None:
    """Check a profile, and show what it says.

    Exit code: 0 fine, 2 it cannot be read or is wrong.

    Example: cacheflow profile show profiles/h100-qwen3-8b.json
    """
    try:
        profile = load_profile(file)
    except ProfileError as error:
        fail(str(error))
    _print(profile)
    write_json(json, profile)


def _modelled(gpu: str, model: str) -> Profile:
    return modelled_profile(
        GPUS[gpu],
        MODELS[model],
        command=f"cacheflow profile model --gpu {gpu} --model {model} --out {gpu}-{model}.json",
        date=datetime.now(UTC).date().isoformat(),
        versions={"cacheflow-sgl": version("cacheflow-sgl")},
    )


def _write(path: Path, profile: Profile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, encode(profile))
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
    console.print(f"wrote {path}", markup=False, highlight=False)


def _print(profile: Profile) -> None:
    console.print(
        f"{profile.model} ({profile.dtype}) on {profile.hardware}: {profile.source} {profile.date}",
        markup=False,
        highlight=False,
    )
    console.print(
        f"{profile.layers} layers, {profile.kv_bytes_per_token} bytes of KV a token, "
        f"{profile.boundary_bytes_per_token} at a stage boundary; "
        f"a decode step {1e3 * profile.decode.base_s:.3g} ms "
        f"and {1e6 * profile.decode.per_context_token_s:.3g} ms per 1000 tokens of context",
        markup=False,
        highlight=False,
    )
    console.print(Group(_chunks(profile), _tiers(profile), _thresholds(profile)))
    console.print(profile.method, markup=False, highlight=False, style="dim")


def _chunks(profile: Profile) -> Table:
    table = _table(f"A chunk of {profile.chunk} tokens", "start", "ms", "tokens a second")
    cost = TableCost(profile)
    for start in profile.compute.starts:
        seconds = cost.seconds(start, profile.chunk)
        table.add_row(str(start), f"{1e3 * seconds:.1f}", f"{profile.chunk / seconds:.0f}")
    return table


def _tiers(profile: Profile) -> Table:
    table = _table("Tiers", "tier", "latency us", "GB a second", "tokens a second")
    for tier in profile.tiers:
        table.add_row(
            tier.name,
            f"{1e6 * tier.latency_s:.0f}",
            f"{tier.bytes_per_s / 1e9:.2f}",
            f"{tier.bytes_per_s / profile.kv_bytes_per_token:.0f}",
        )
    return table


def _thresholds(profile: Profile) -> Table:
    table = _table("Layer-wise is no worse up to", "Gbps", "prefix tokens")
    for threshold in profile.layer_thresholds:
        more = " or more" if threshold.tokens >= MOST_TOKENS else ""
        table.add_row(f"{threshold.bandwidth_gbps:g}", f"{threshold.tokens}{more}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table
