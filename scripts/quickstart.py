"""Serve a model with the cacheflow backend and replay one trace new, flushed and restarted."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cacheflow_sgl.client import ServerError, ServerProcess
from cacheflow_sgl.cpu.tiny_model import write_tiny_model
from cacheflow_sgl.replay import (
    ReplayError,
    ReplayOptions,
    Report,
    Trace,
    compare_table,
    load_trace,
    plot_runs,
    replay,
)
from hicache_tiers import DiskStore, StoreConfig

console = Console()
_QUIET_SECONDS = 3.0


def main(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Model to serve; default: a tiny one.")] = None,
    trace: Annotated[str, typer.Option(help="Trace file or folder, or 'demo'.")] = "demo",
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("runs/quickstart"),
) -> None:
    """Serve, replay, flush, replay, restart, replay; then compare the three."""
    out.mkdir(parents=True, exist_ok=True)
    pages = out / "pages"
    shutil.rmtree(pages, ignore_errors=True)  # so that the first replay finds nothing
    if model is None:
        model = str(write_tiny_model(out / "tiny-model"))
    try:
        loaded = load_trace(trace)
        runs = _serve_and_replay(model, context.args, loaded, pages, out)
    except (ReplayError, ServerError) as error:
        console.print(f"quickstart: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    _show(runs, out)


def _serve_and_replay(
    model: str, flags: list[str], trace: Trace, pages: Path, out: Path
) -> list[tuple[str, Report]]:
    runs: list[tuple[str, Report]] = []

    def run(label: str) -> None:
        console.print(f"replaying {trace.name}: {label}")
        report = replay(trace, server.url, ReplayOptions(arrival="asap", concurrency=2))
        report.write(out / f"{label.replace(' ', '-')}.json")
        runs.append((label, report))

    console.print(f"starting SGLang, log in {out / 'server.log'}")
    with ServerProcess(model, _flags(pages, flags), log_path=out / "server.log") as server:
        run("new")
        _wait_until_stored(pages)
        server.client.flush_cache()
        run("after flush")
        console.print("restarting SGLang")
        server.restart()
        run("after restart")
    return runs


def _flags(pages: Path, extra: list[str]) -> list[str]:
    options = json.dumps({"directory": str(pages.resolve()), "capacity": "50GB"})
    return [
        "--enable-hierarchical-cache",
        *("--hicache-storage-backend", "cacheflow"),
        *("--hicache-storage-backend-extra-config", options),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--page-size", "64"),
        "--enable-metrics",
        "--enable-cache-report",
        *extra,
    ]


def _wait_until_stored(pages: Path) -> None:
    """Wait until the server has written back what it computed; it does so in the background."""
    store = DiskStore.open(StoreConfig(directory=pages, capacity_bytes=2**60))
    try:
        seen, since = -1, time.monotonic()
        while time.monotonic() - since < _QUIET_SECONDS:
            if (records := store.usage().records) != seen:
                seen, since = records, time.monotonic()
            time.sleep(0.2)
    finally:
        store.close()


def _show(runs: list[tuple[str, Report]], out: Path) -> None:
    console.print(compare_table(runs))
    plot = out / "quickstart.png"
    plot_runs(runs, plot)
    console.print(f"plot: {plot}   reports: {out}/*.json")
    failed = sum(report.summary.failed for _, report in runs)
    restored = [report.summary.tokens.storage for _, report in runs[1:]]
    if failed or not all(restored):
        console.print(f"quickstart: {failed} requests failed, tokens restored: {restored}")
        sys.exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(main)
    app()
