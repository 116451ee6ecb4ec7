"""`bench restore`: start a server, measure, and say what came out."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from pathlib import Path

import msgspec
from rich.console import Console

from cacheflow_sgl.bench.environment import Environment
from cacheflow_sgl.bench.options import RestoreOptions
from cacheflow_sgl.bench.protocol import Control
from cacheflow_sgl.bench.rounds import Bench, planned_requests
from cacheflow_sgl.bench.rows import Row, rows_of
from cacheflow_sgl.bench.server import bench_server
from cacheflow_sgl.progress import progress_bar


class RestoreResult(msgspec.Struct, frozen=True):
    """All of a run, as in its JSON file."""

    environment: Environment
    rows: list[Row]


def bench_restore(
    options: RestoreOptions, *, on_cpu: bool, console: Console | None = None
) -> Generator[list[Row], None, None]:
    """Measure restores in a server of one's own, with progress on `console` (default stderr).

    Yields the rows of one prefix length and balance after the other; the server ends with it.

    Raises:
        BenchError: the server did not do what it was asked for.
        ServerError: it did not start, refused a request or broke off.
    """
    with (
        tempfile.TemporaryDirectory(prefix="cacheflow-bench-") as name,
        progress_bar(console or Console(stderr=True)) as progress,
    ):
        directory = Path(name)
        task = progress.add_task("starting the server", total=None)
        model = options.model or str(_tiny_model(directory, options.seed))
        control = Control(directory / "settings.json")
        with bench_server(model, options, directory, control.path, on_cpu=on_cpu) as server:
            progress.update(task, description="restores", total=planned_requests(options))
            bench = Bench(server.client, control, options, lambda: progress.advance(task))
            for measurement in bench.measure():
                yield rows_of(measurement, options.policies)


def _tiny_model(directory: Path, seed: int) -> Path:
    from cacheflow_sgl.cpu.tiny_model import Recipe, write_tiny_model  # imports torch

    return write_tiny_model(directory / "model", Recipe(seed=seed))
