"""Reports on a terminal of 80 columns: one run as tables, several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cacheflow_sgl.replay.report import TIERS, Report, Stats, Tokens

_TIER_LABELS = {
    "device": "device",
    "host": "host",
    "storage": "storage",
    "cached_tier_unknown": "cached, tier unknown",
    "recomputed": "recomputed",
}


def print_report(report: Report, console: Console) -> None:
    """Print one run: what was sent, how long it took, where the tokens came from, what failed."""
    summary, environment = report.summary, report.environment
    console.print(
        f"[bold]{escape(environment.trace)}[/] ({environment.format}) against {environment.url}",
        highlight=False,
    )
    console.print(_counts_table(report))
    console.print(_latency_table(report))
    if summary.input_tokens:
        console.print(_tokens_table(summary.tokens))
    if summary.errors:
        console.print(_errors_table(report))
    for note in summary.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    if summary.interrupted:
        console.print(
            f"interrupted: {summary.not_sent} of {summary.requests} requests not completed",
            style="yellow",
        )


def compare_table(reports: Sequence[tuple[str, Report]]) -> Table:
    """One row a run: TTFT, and where the tokens of its prompts came from."""
    unknown = any(report.summary.tokens.cached_tier_unknown for _, report in reports)
    tiers = [f.name for f in TIERS if f.name != "cached_tier_unknown" or unknown]
    table = Table("run", caption="TTFT in ms; tokens by where their KV came from")
    for heading in ("p50", "p95", *("cached" if t.endswith("unknown") else t for t in tiers)):
        table.add_column(heading, justify="right")
    failed = any(report.summary.failed for _, report in reports)
    if failed:
        table.add_column("errors", justify="right", style="red")
    for label, report in reports:
        summary = report.summary
        row = [_ms(summary.ttft_s.p50), _ms(summary.ttft_s.p95)]
        row += [f"{getattr(summary.tokens, tier):,}" for tier in tiers]
        row += [f"{summary.failed:,}"] if failed else []
        table.add_row(escape(label), *row)
    return table


def _counts_table(report: Report) -> Table:
    summary = report.summary
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    requests = f"{summary.succeeded:,} of {summary.requests:,}"
    table.add_row("requests answered", requests)
    table.add_row("errors", f"{summary.failed:,}", style="red" if summary.failed else None)
    if summary.broken_lines:
        table.add_row("broken trace lines, skipped", f"{summary.broken_lines:,}")
    table.add_row("input tokens", f"{summary.input_tokens:,}")
    table.add_row("output tokens", f"{summary.output_tokens:,}")
    table.add_row("output tokens per second", f"{summary.output_tokens_per_s:,.1f}")
    table.add_row("duration", f"{summary.duration_s:,.1f} s")
    return table


def _latency_table(report: Report) -> Table:
    summary = report.summary
    rows = {
        "TTFT": summary.ttft_s,
        "time per output token": summary.tpot_s,
        "TTLT": summary.ttlt_s,
    }
    # Whichever unit keeps the table within 80 columns.
    slow = any((stats.max or 0) >= 10 for stats in rows.values())
    table = Table("seconds" if slow else "milliseconds")
    for heading in Stats.__struct_fields__:
        table.add_column(heading, justify="right")
    shown = _s if slow else _ms
    for label, stats in rows.items():
        table.add_row(label, *(shown(getattr(stats, name)) for name in Stats.__struct_fields__))
    return table


def _tokens_table(tokens: Tokens) -> Table:
    table = Table("prompt tokens from")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    counts = {tier.name: getattr(tokens, tier.name) for tier in TIERS}
    total = sum(counts.values())
    for name, count in counts.items():
        if count or name != "cached_tier_unknown":
            table.add_row(_TIER_LABELS[name], f"{count:,}", f"{count / total:.1%}")
    return table


def _errors_table(report: Report) -> Table:
    table = Table("error", "count", "first message", style="red")
    for error in report.summary.errors:
        table.add_row(error.kind, str(error.count), escape(error.first))
    return table


def _s(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:.3f}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:.1f}"
