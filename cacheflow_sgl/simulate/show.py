"""Simulated rows on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cacheflow_sgl.core.simulator.setup import Engine
from cacheflow_sgl.simulate.never_worse import NeverWorseRow
from cacheflow_sgl.simulate.paper import COMMON_PROFILE, COMMON_SUFFIX_TOKENS, PaperRow
from cacheflow_sgl.simulate.rows import Row

_PAPER_COLUMNS = (
    "figure",
    "grade",
    "published",
    "simulated",
    "difference",
    "within",
    "common",
    "assumed",
    "what moves it",
)
_LEGEND = """\
TTFT in simulated seconds
/ best: its mean over that of the better of the policies recompute and load;
  what is left of it with `--engine recompute,load` comes from the order
tokens: % of prompts from device/loaded/recomputed; busy: % of time, compute/I/O"""


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Print a table for each profile and pipeline, what its columns are, and any overload."""
    for _, group in groupby(rows, _table):
        console.print(rows_table(list(group)))
    console.print(_LEGEND, markup=False, highlight=False, style="dim")
    late = [row for row in rows if row.overloaded]
    if late:
        line = _overload(late, len(rows))
        console.print(line, markup=False, highlight=False, soft_wrap=True, style="yellow")


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
    """The policy, and its engine where that is neither ours nor the policy's own."""
    usual = row.engine in (Engine.STAIRCASE, row.policy)
    return row.policy if usual else f"{row.policy} {row.engine}"


def pipeline(row: Row) -> str:
    """Stages and boundary; empty where there is one stage."""
    return f", {row.pp} stages, boundary {row.boundary}" if row.pp > 1 else ""


def _overload(late: Sequence[Row], rows: int) -> str:
    """Says of the row that is furthest behind how far it is."""
    worst = max(late, key=lambda row: row.behind_s or 0.0)
    return (
        f"{len(late)} of {rows} rows overloaded: {worst.arrivals_s:,.0f} s of arrivals, "
        f"{label(worst)} {worst.behind_s:,.0f} s more; lower --speed"
    )


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


def paper_table(rows: Sequence[PaperRow]) -> Table:
    """Published beside simulated figures; the assumptions are in the JSON and Markdown files."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("figure (grade)")
    for heading in ("published", "simulated", "difference", "within"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(escape(f"{row.what} ({row.grade})"), *_beside(row))
    return table


def paper_markdown(rows: Sequence[PaperRow], command: str, date: str) -> str:
    """The table with its assumptions, as a file that says how it was made."""
    lines = [
        "# Published figures, simulated",
        "",
        f"Made by `{command}` on {date}; every simulated figure stands on a modelled profile.",
        "",
        "- Grade A: authors' text; S: seed documents; N: a reader's notes.",
        "- `within`: 15% or better.",
        "- Conditions of most figures were never published. Those assumed were chosen among",
        "  plausible ones, so `within` says that such conditions exist, not that they were the",
        "  paper's.",
        "- The cost profiles were fitted to Cake's four points and committed before this was run.",
        f"- `common`: with {COMMON_PROFILE} and {COMMON_SUFFIX_TOKENS} new tokens in every row.",
        "- Ours is `cacheflow` as it is here (by cells, shortest first), also in rows about v1.",
        "- All forwards are of 512 tokens, as Cake's; larger ones help recompute, most with MoE.",
        "",
        f"| {' | '.join(_PAPER_COLUMNS)} |",
        f"|{len(_PAPER_COLUMNS) * '---|'}",
    ]
    lines += [
        f"| {row.what} | {row.grade} | {' | '.join(_beside(row))} | {_common(row)} "
        f"| {row.assumed} | {row.why} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _common(row: PaperRow) -> str:
    return "-" if row.common is None else f"{_figure(row.common)} {row.unit}"


def _beside(row: PaperRow) -> tuple[str, str, str, str]:
    published, simulated = (
        f"{_figure(each)} {row.unit}" for each in (row.published, row.simulated)
    )
    return published, simulated, f"{row.difference:+.1%}", "yes" if row.within else "no"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def never_worse_table(rows: Sequence[NeverWorseRow]) -> Table:
    """The worst case of each profile and kind of knowledge."""
    table = Table(
        title="cacheflow over the better of recompute and load: the worst of each",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("profile", "costs"):
        table.add_column(heading)
    for heading in ("mean", "p99", "limit", "Gbps", "prefix", "batch"):
        table.add_column(heading, justify="right")
    key = _knowledge
    for _, group in groupby(sorted(rows, key=key), key):
        worst = max(group, key=lambda row: row.worst)
        table.add_row(*_never_worse_cells(worst), style="red" if worst.worst > 1 else None)
    return table


def _knowledge(row: NeverWorseRow) -> tuple[str, str]:
    return row.profile, row.costs


def _never_worse_cells(row: NeverWorseRow) -> list[str]:
    ratios = [f"{ratio:.3f}" for ratio in (row.mean_ratio, row.p99_ratio, row.limit)]
    return [
        row.profile,
        row.costs,
        *ratios,
        f"{row.gbps:g}",
        f"{row.prefix_tokens:,}",
        f"{row.batch}",
    ]
