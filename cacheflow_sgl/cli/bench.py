"""`cacheflow bench`: variants measured side by side in one server."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from cacheflow_sgl.bench.environment import Environment
from cacheflow_sgl.bench.options import POLICIES, RestoreOptions
from cacheflow_sgl.bench.protocol import BenchError
from cacheflow_sgl.bench.restore import RestoreResult, bench_restore
from cacheflow_sgl.bench.rows import Row
from cacheflow_sgl.bench.show import faults, print_rows
from cacheflow_sgl.client import ServerError

from .input import interruptible, numbers
from .output import JsonOption, console, fail, write_json
from .serve import detect_hardware

app = typer.Typer(
    help="Measure variants side by side in one server.", no_args_is_help=True, add_completion=False
)


@app.callback()
def bench() -> None:
    """Measure variants side by side in one server."""


@app.command()
def restore(
    tier: Annotated[str, typer.Option(help="Where the prefix lies: host.")] = "host",
    policies: Annotated[
        str, typer.Option(help=f"Rows to report, of {', '.join(POLICIES)}.")
    ] = "recompute,load,cake,cacheflow",
    balance: Annotated[
        str,
        typer.Option(help="Time to recompute / time to load, set by a throttle; a list."),
    ] = "1",
    prefix_tokens: Annotated[
        str, typer.Option(help="Tokens to restore, whole pages; a list.")
    ] = "4096",
    suffix_tokens: Annotated[int, typer.Option(help="New tokens after them, at most a page.")] = 64,
    batch: Annotated[int, typer.Option(help="Requests at once: 1.")] = 1,
    repeats: Annotated[int, typer.Option(help="Counted rounds.")] = 15,
    model: Annotated[
        str | None, typer.Option(help="Directory or name; on a CPU a tiny one by default.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Rows of a prefill forward.")] = 512,
    page: Annotated[int, typer.Option(help="Tokens of a KV page.")] = 64,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="SGLang's overlap schedule.")
    ] = True,
    decode: Annotated[int, typer.Option(help="Requests that decode beside each restore.")] = 0,
    seed: Annotated[int, typer.Option(help="Of prompts and weights.")] = 0,
    json: JsonOption = None,
) -> None:
    """Time to first token of a request whose prefix left the device.

    Starts a server, brings one prefix to its host, evicts the device before each
    request, and asks for the same restore under every policy in turn. Lists take
    commas. Each output is compared with that of a server that had cached nothing.

    The bound of a row is computed from the same rounds: what recompute took for
    each chunk, the rate that loads reached, and the request without a restore.

    Exit code: 0 fine, 1 an output differs or loads fell short of the throttle,
    2 could not start or go on, 130 interrupted. What was measured is reported
    in any case.

    Example: three speeds of the link, as fast as compute, half and twice.

        cacheflow bench restore --balance 1,0.5,2 --json restore.json

    Example: what a restore does to four requests that decode beside it.

        cacheflow bench restore --decode 4
    """
    if tier != "host":
        fail(f"--tier {tier} is not there yet; it can be: host")
    if batch != 1:
        fail(f"--batch {batch} is not there yet; it can be: 1")
    try:
        options = RestoreOptions(
            policies=tuple(policies.split(",")),
            balances=numbers("--balance", balance, float),
            prefix_tokens=numbers("--prefix-tokens", prefix_tokens, int),
            suffix_tokens=suffix_tokens,
            repeats=repeats,
            model=model,
            chunk=chunk,
            page=page,
            overlap=overlap,
            decodes=decode,
            seed=seed,
        )
    except ValueError as error:
        fail(str(error))
    on_cpu = detect_hardware().accelerator is None
    if model is None and not on_cpu:
        fail("--model is missing; only on a CPU there is one by default")
    environment = Environment.now(model or "tiny model", on_cpu=on_cpu)
    rows: list[Row] = []
    problem: tuple[str, int] | None = None
    try:
        with closing(bench_restore(options, on_cpu=on_cpu)) as measured, interruptible():
            for more in measured:
                rows += more
    except (BenchError, ServerError) as error:
        problem = str(error), 2
    except KeyboardInterrupt:
        problem = "interrupted; what was measured is above", 130
    if rows:
        print_rows(environment, rows, console)
        write_json(json, RestoreResult(environment, rows))
    if problem:
        fail(*problem)
    if faults(rows):
        raise typer.Exit(1)
