"""Serve a model with the cacheflow backend and replay one trace new, flushed and restarted."""

import contextlib
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from cacheflow_sgl.client import ServerError, ServerProcess, ServerStartError
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
from hicache_tiers import DiskStore, StoreError

MEANING = (
    "The first run computes its prompts and stores their pages; the flush then empties device and "
    "host memory, and the restart replaces the server, so the tokens that the later runs count "
    "under storage came back from disk instead of being recomputed."
)
console = Console()
_QUIET_SECONDS = 3.0
_LOG_LINES = 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class QuickstartError(Exception):
    """One line for the user: what, where, the mend."""


def main(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Model to serve; default: a tiny one.")] = None,
    trace: Annotated[str, typer.Option(help="Trace file or folder, or 'demo'.")] = "demo",
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("runs/quickstart"),
    start_timeout: Annotated[
        float, typer.Option(help="Seconds until the server must be ready, downloads included.")
    ] = 1800,
) -> None:
    """Serve, replay, flush, replay, restart, replay; then compare the three."""
    _interrupt_on_signals()
    try:
        loaded = load_trace(trace)
        out.mkdir(parents=True, exist_ok=True)
        pages, log = out / "pages", out / "server.log"
        _remove_pages(pages)  # so that the first replay finds nothing
        log.unlink(missing_ok=True)
        served = model or str(write_tiny_model(out / "tiny-model"))
        server = ServerProcess(
            served, _flags(pages, context.args), log_path=log, start_timeout_s=start_timeout
        )
        runs = _serve_and_replay(server, loaded, pages, out)
        plot_runs(runs, out / "quickstart.png")
    except (QuickstartError, ReplayError, ServerError, StoreError, OSError) as error:
        console.print(f"quickstart: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("quickstart: interrupted; the server is stopped", style="yellow")
        raise typer.Exit(130) from None
    console.print(MEANING)
    console.print(f"plot: {out}/quickstart.png   reports: {out}/*.json", markup=False)


def _interrupt_on_signals() -> None:
    for each in _SIGNALS:
        signal.signal(each, _interrupt)


def _interrupt(_signal: int = 0, _frame: FrameType | None = None) -> NoReturn:
    _ignore_signals()
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    """For the end: a second signal would end this process before the server it is stopping."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def _remove_pages(pages: Path) -> None:
    """Remove the store of an earlier run, and nothing that is not one."""
    if (pages / "FORMAT").is_file():
        shutil.rmtree(pages)
    elif pages.is_symlink() or (pages.exists() and not (pages.is_dir() and _is_empty(pages))):
        raise QuickstartError(
            f"{pages} is not a page store of ours (no FORMAT file in it), so it is left alone; "
            "move it away, or give another --out"
        )


def _is_empty(folder: Path) -> bool:
    return next(folder.iterdir(), None) is None


def _serve_and_replay(
    server: ServerProcess, trace: Trace, pages: Path, out: Path
) -> list[tuple[str, Report]]:
    runs: list[tuple[str, Report]] = []

    def run(label: str) -> None:
        console.print(f"replaying {trace.name}: {label}", markup=False)
        report = replay(trace, server.url, ReplayOptions(arrival="asap", concurrency=2))
        _interrupt_on_signals()  # asyncio has put the default handlers in their place
        if report.summary.interrupted:
            _interrupt()
        report.write(out / f"{label.replace(' ', '-')}.json")
        runs.append((label, report))

    try:
        console.print(f"starting SGLang, log in {server.log_path}", markup=False)
        with _progress(server.log_path):
            server.start()
        run("new")
        _wait_until_stored(pages)
        server.client.flush_cache()
        run("after flush")
        console.print("restarting SGLang")
        with _progress(server.log_path):
            server.restart()
        run("after restart")
        console.print(compare_table(runs))
        _check(runs)
    except ServerStartError:
        raise  # says itself how the log ends
    except (QuickstartError, ReplayError, ServerError, StoreError):
        console.print(f"{server.log_path} ends with:", markup=False)
        console.print(server.log_tail(_LOG_LINES), markup=False, highlight=False)
        raise
    finally:
        _ignore_signals()
        server.stop()
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


class _Waiting:
    """A line on the terminal while a server starts: for how long, and what its log says."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._since = time.monotonic()
        self._spinner = Spinner("dots")

    def __rich__(self) -> Spinner:
        text = f"{time.monotonic() - self._since:4.0f} s  {_last_line(self._log)}"
        self._spinner.update(text=Text(text[: console.width - 4]))
        return self._spinner


def _progress(log: Path) -> contextlib.AbstractContextManager[Live]:
    return Live(_Waiting(log), console=console, transient=True, refresh_per_second=4)


def _last_line(log: Path) -> str:
    """The last line that is not empty; a progress bar (of a download) ends with no newline."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            tail = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in re.split(r"[\r\n]", tail)]
    return next((line for line in reversed(lines) if line), "")


def _wait_until_stored(pages: Path) -> None:
    """Wait until the server has written back what it computed; it does so in the background."""
    with _existing_store(pages) as store:
        seen, since = -1, time.monotonic()
        while time.monotonic() - since < _QUIET_SECONDS:
            if (records := store.usage().records) != seen:
                seen, since = records, time.monotonic()
            time.sleep(0.2)


@contextlib.contextmanager
def _existing_store(pages: Path) -> Iterator[DiskStore]:
    store = DiskStore.open_existing(pages)
    try:
        yield store
    finally:
        store.close()


def _check(runs: list[tuple[str, Report]]) -> None:
    for label, report in runs:
        if report.summary.failed:
            error = report.summary.errors[0]
            raise QuickstartError(
                f"{label}: {report.summary.failed} requests failed ({error.kind}: {error.first})"
            )
        if label != "new" and not report.summary.tokens.storage:
            raise QuickstartError(f"{label}: no tokens came back from disk")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"allow_extra_args": True})(main)
    app()
