"""Simulated rows on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cacheflow_sgl.simulate.rows import Row

_LEGEND = """\
TTFT in simulated seconds; / best: its mean over that of the better single way
tokens: % of prompts from device/loaded/recomputed; busy: % of time, compute/I/O"""


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Print a table for each profile and pipeline, and what its columns are."""
    for _, group in groupby(rows, _table):
        console.print(rows_table(list(group)))
    console.print(_LEGEND, markup=False, highlight=False, style="dim")


def rows_table(rows: Sequence[Row]) -> Table:
    """Rows of one profile and pipeline."""
    table = Table(
        title=escape(_title(rows[0])),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy")
    for heading in ("mean", "p50", "p90", "p99", "/ best", "tokens", "busy"):
        table.add_column(heading, justify="right")
    for case, group in groupby(rows, _case):
        table.add_section()
        table.add_row(escape(case))
        for row in group:
            table.add_row(f"  {escape(label(row))}", *_figures(row))
    return table


def label(row: Row) -> str:
    """The policy, and its engine where it has one that it need not have."""
    return f"{row.policy} {row.engine}" if row.engine == "v1" else row.policy


def pipeline(row: Row) -> str:
    """Stages and boundary; empty where there is one stage."""
    return f", {row.pp} stages, boundary {row.boundary}" if row.pp > 1 else ""


def _table(row: Row) -> tuple[str, str]:
    return row.profile, pipeline(row)


def _case(row: Row) -> str:
    return f"{row.link}, {row.workload}" if row.batch else row.link


def _title(row: Row) -> str:
    what = "" if row.batch else f"\n{row.workload}, {row.requests:,} requests"
    return (
        f"simulated {row.simulated}: {row.profile}\n"
        f"{row.model} on {row.hardware}{pipeline(row)}{what}"
    )


def _figures(row: Row) -> list[str]:
    times, tokens = row.ttft_s, row.tokens
    counts = (tokens.device, tokens.loaded, tokens.recomputed)
    shares = "/".join(f"{100 * count / sum(counts):.0f}" for count in counts)
    ratio = "-" if row.ratio_to_best_single is None else f"{row.ratio_to_best_single:.2f}"
    busy = f"{100 * row.compute_busy:.0f}/{100 * row.io_busy:.0f}"
    return [*map(_s, (times.mean, times.p50, times.p90, times.p99)), ratio, shares, busy]


def _s(seconds: float) -> str:
    """Three digits, but whole seconds in full."""
    if seconds >= 100:
        return f"{seconds:,.0f}"
    return (
        f"{seconds:.1f}"
        if seconds >= 10
        else f"{seconds:.2f}"
        if seconds >= 1
        else f"{seconds:.3f}"
    )
