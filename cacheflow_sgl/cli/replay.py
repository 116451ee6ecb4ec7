"""``cacheflow replay``: a recorded trace against a running SGLang server."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from cacheflow_sgl.replay import (
    ReplayError,
    ReplayOptions,
    Report,
    load_trace,
    plot_runs,
    print_report,
)
from cacheflow_sgl.replay import replay as run_replay
from cacheflow_sgl.replay.load import TraceFormat
from cacheflow_sgl.replay.plot import check_plot_name
from cacheflow_sgl.replay.trace import Trace

_BROKEN_SHOWN = 5  # of the skipped lines of a trace; the report counts all of them


def replay(
    trace: Annotated[
        str, typer.Option(help="A trace file, a folder of them, or 'demo' (bundled).")
    ] = "demo",
    format: Annotated[
        TraceFormat, typer.Option(help="Format of the trace; auto looks at its content.")
    ] = "auto",
    url: Annotated[
        str, typer.Option(help="The server; http:// may be left out.")
    ] = "http://127.0.0.1:30000",
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report, request by request.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the TTFT distribution.")
    ] = None,
    arrival: Annotated[
        Literal["original", "asap"],
        typer.Option(
            help="original: at the trace's times; asap: as soon as a session slot is free. "
            "Turns of one session always follow one another."
        ),
    ] = "original",
    speed: Annotated[float, typer.Option(help="Replay the arrival times this much faster.")] = 1.0,
    concurrency: Annotated[int, typer.Option(help="Sessions at the same time.")] = 8,
    sessions: Annotated[int | None, typer.Option(help="Only the first so many sessions.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests.")] = None,
    scale: Annotated[
        float,
        typer.Option(help="Mooncake: blocks and prompts this much as long, sharing kept."),
    ] = 1.0,
    shared_context_tokens: Annotated[
        int,
        typer.Option(
            help="Chats: about this many tokens of the trace's own tool outputs "
            "in front of every session, as an agent's fixed context."
        ),
    ] = 0,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Cut longer prompts at their end.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Generate as the trace says, but at most so many tokens.")
    ] = 16,
    seed: Annotated[int, typer.Option(help="Chooses the tokens that hash ids stand for.")] = 0,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Mooncake: needed only if the server does not tokenize."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds one request may take.")] = 600.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="SGLANG_API_KEY", help="The server's --api-key.")
    ] = None,
) -> None:
    """Replay a recorded trace against a running SGLang server.

    Reports time to first token, time per output token, and how many prompt
    tokens came from device, host, storage, or were recomputed.

    Reads Mooncake, SWE-agent, mini-swe-agent, ShareGPT, WildChat, LMSYS-Chat
    and OpenAI-request traces. Ctrl-C ends a replay and reports what there is.

    Exit code: 0 all requests answered, 1 some failed, 2 could not start,
    130 interrupted.

    Example: the bundled agent trace, twice; the second run finds its prefixes.

        cacheflow replay --trace demo --json first.json

        cacheflow replay --trace demo --json second.json --plot second.png

    Example: production chat, 10 times faster, a quarter of the prompt lengths.

        cacheflow replay --trace conversation_trace.jsonl --speed 10 --scale 0.25
    """
    try:
        options = ReplayOptions(
            arrival=arrival,
            speed=speed,
            concurrency=concurrency,
            scale=scale,
            shared_context_tokens=shared_context_tokens,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            sessions=sessions,
            limit=limit,
            seed=seed,
            vocab_size=vocab_size,
            timeout_s=timeout,
        )
        check_outputs(json, plot=plot)
        loaded = load_trace(trace, format)
        warn_skipped(loaded)
        report = run_replay(loaded, url, options, api_key=api_key)
        try:
            _write(report, loaded.name, json, plot)
        finally:
            print_report(report, Console())
    except ReplayError as error:
        typer.echo(f"cacheflow replay: {error}", err=True)
        raise typer.Exit(2) from None
    if report.summary.interrupted:
        raise typer.Exit(130)
    if report.summary.failed:
        raise typer.Exit(1)


def check_outputs(*files: Path | None, plot: Path | None) -> None:
    """Find out before long work, not after it, that what it finds has no place."""
    for path in (*files, plot):
        if path is not None:
            _check_writable(path)
    if plot is not None:
        check_plot_name(plot)


def _check_writable(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ReplayError(f"{path}: not a file in an existing folder")
    if path.exists() and not os.access(path, os.W_OK):
        raise ReplayError(f"{path}: may not be written")
    if path.exists() and not path.is_file():
        return  # /dev/stdout and the like need no room beside them
    try:
        # Only trying tells: permissions say yes to root, also where a file system is read-only.
        tempfile.TemporaryFile(dir=path.absolute().parent).close()
    except OSError as error:
        raise ReplayError(f"{path}: cannot write to its folder: {error.strerror}") from None


def warn_skipped(trace: Trace) -> None:
    """Say on stderr what of a trace was skipped."""
    if trace.note:
        typer.echo(f"note: {trace.note}", err=True)
    for broken in trace.broken[:_BROKEN_SHOWN]:
        typer.echo(f"skipped {broken}", err=True)
    more = len(trace.broken) - _BROKEN_SHOWN
    if more > 0:
        typer.echo(f"skipped {more} more broken lines", err=True)


def _write(report: Report, label: str, json: Path | None, plot: Path | None) -> None:
    if json is not None:
        report.write(json)
    if plot is not None:
        plot_runs([(label, report)], plot)
