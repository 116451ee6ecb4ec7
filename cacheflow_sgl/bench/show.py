"""A restore bench on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cacheflow_sgl.bench.environment import Environment
from cacheflow_sgl.bench.rows import LEAST_LANE_RATE, Interval, Row


def print_rows(environment: Environment, rows: Sequence[Row], console: Console) -> None:
    """Print the rows, and what is wrong with them."""
    load = environment.load_average[0]
    console.print(
        f"{escape(environment.model)} on {escape(environment.hardware)}, "
        f"{environment.cpus} cores, load average {load:.1f}",
        highlight=False,
    )
    for _, group in groupby(rows, _case):
        measured = list(group)
        console.print(rows_table(measured))
        for line in lane_lines(measured):
            console.print(line, markup=False, highlight=False)
        if any(row.decodes for row in measured):
            console.print(decodes_table(measured))
    for fault in faults(rows):
        console.print(fault, style="red", markup=False, highlight=False)


def faults(rows: Sequence[Row]) -> list[str]:
    """Why the rows cannot be relied on, one line each; none where they can."""
    said = {
        f"void: at {_where(row)} load reached {row.lane_rate_reached:.2f} of the throttle; "
        f"less than {LEAST_LANE_RATE} is no such balance": None
        for row in rows
        if row.void
    }
    said |= {
        f"wrong: at {_where(row)} an output of {row.policy} differs from the control's": None
        for row in rows
        if not row.outputs_equal
    }
    return list(said)


def rows_table(rows: Sequence[Row]) -> Table:
    """The rows of one prefix length and balance, within 80 columns."""
    first = rows[0]
    table = Table(
        title=f"{first.prefix_tokens} tokens on the {first.tier}, "
        f"balance {first.balance:g} (reached {first.balance_reached:.2f})",
        caption="TTFT: median, range; ratios paired by round: median, 95% interval",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    for heading in ("policy", "TTFT, ms", "/ best\nsingle", "/ bound", "choice"):
        table.add_column(heading)
    for heading in ("meet", "equal,\n|dlogp|", "compute,\nI/O busy"):
        table.add_column(heading, justify="right")
    for row in rows:
        ttft = row.ttft_s
        table.add_row(
            row.policy,
            f"{_ms(ttft.median)}\n{_ms(ttft.min)}-{_ms(ttft.max)}",
            _ratio(row.ratio_to_best_single, row.ratio_to_best_single_interval),
            _ratio(row.ratio_to_bound, row.ratio_to_bound_interval),
            escape(row.choice),
            "-" if row.meet_tokens is None else f"{row.meet_tokens:.0f}",
            f"{'yes' if row.outputs_equal else '[red]no[/]'}\n{row.max_abs_dlogprob:.0e}",
            f"{row.compute_busy:.0%}\n{row.io_busy:.0%}",
        )
    return table


def lane_lines(rows: Sequence[Row]) -> list[str]:
    """How far both lanes worked at once, and what each cost the other; one line a policy."""
    return [
        f"{row.policy}: lanes overlap {row.lane_overlap:.0%}; beside each other compute takes "
        f"{row.compute_slowdown:.2f}x as long, loads {row.io_slowdown:.2f}x"
        for row in rows
        if row.lane_overlap is not None
        and row.compute_slowdown is not None
        and row.io_slowdown is not None
    ]


def decodes_table(rows: Sequence[Row]) -> Table:
    """What the decodes beside the restores of one measurement did."""
    table = Table(
        title=f"{rows[0].decodes} decodes beside these restores",
        caption="ratios of the time per token, paired by round",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    for heading in ("policy", "ms a token", "tokens/s", "/ recompute", "/ load"):
        table.add_column(heading)
    for row in rows:
        if row.decode_tpot_s is None or row.decode_tokens_per_s is None:
            continue
        table.add_row(
            row.policy,
            _ms(row.decode_tpot_s),
            f"{row.decode_tokens_per_s:.1f}",
            _ratio(row.decode_tpot_ratio_to_recompute, row.decode_tpot_ratio_to_recompute_interval),
            _ratio(row.decode_tpot_ratio_to_load, row.decode_tpot_ratio_to_load_interval),
        )
    return table


def _case(row: Row) -> tuple[int, float]:
    return row.prefix_tokens, row.balance


def _where(row: Row) -> str:
    return f"{row.prefix_tokens} tokens, balance {row.balance:g},"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:.1f}"


def _ratio(median: float | None, interval: Interval | None) -> str:
    if median is None or interval is None:
        return "-"
    return f"{median:.2f}\n{interval[0]:.2f}-{interval[1]:.2f}"
