"""Figures of simulated rows; needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.replay.errors import ReplayError
from cacheflow_sgl.simulate.rows import Row
from cacheflow_sgl.simulate.show import label, pipeline

# Okabe and Ito's colours, which the colour-blind tell apart; markers and dashes say it again.
_STYLES = {
    BatchPolicyName.RECOMPUTE: ("#999999", "s", "--"),
    BatchPolicyName.LOAD: ("#0072b2", "^", "-."),
    BatchPolicyName.CAKE: ("#e69f00", "D", ":"),
    BatchPolicyName.FIFO: ("#56b4e9", "v", "-"),
    BatchPolicyName.LONGEST: ("#cc79a7", "P", "-"),
    BatchPolicyName.CACHEFLOW: ("#d55e00", "o", "-"),
}

_MOST_COLUMNS = 4
_SHARES = 500
"""Points of a distribution that are drawn."""


@dataclass(frozen=True)
class _Axis:
    """What rows may differ in; `said` says one value of it in the title of a panel."""

    name: str
    value: Callable[[Row], float]
    said: str


_AXES = (
    _Axis("prefix tokens", lambda row: _mean(row.prefix_tokens or []), "{:g} tokens"),
    _Axis("link, Gbps", lambda row: row.bandwidth_gbps, "{:g} Gbps"),
    _Axis("requests at once", lambda row: row.batch or 0, "{} at once"),
)


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Write a figure to `path`; its ending chooses the kind (png, svg, ..).

    Rows of a trace: the cumulative distribution of TTFT, a panel a link, a line a policy. Rows of
    given prefixes: mean TTFT over the first of length, bandwidth and batch that has several
    values, a panel for each value of the others.

    Raises:
        ReplayError: the file can't be written; one line.
    """
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    axis = None if rows[0].batch is None else _x_axis(rows)
    panels = _panels(rows, axis)
    columns = min(len(panels), _MOST_COLUMNS)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 3.6 * max(columns, 1.5), 0.9 + 3.1 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, (title, panel) in zip(grid, panels.items(), strict=False):
        _draw_distributions(axes, panel) if axis is None else _draw_means(axes, panel, axis)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelbottom=True)  # which sharing hides above the last line
    for axes in grid[::columns]:
        axes.set_ylabel("share of requests" if axis is None else "mean time to first token, s")
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _describe(figure, grid[0], rows)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path}: cannot write the plot: {error}") from None


def _x_axis(rows: Sequence[Row]) -> _Axis:
    """The first axis along which rows of one panel differ; the length where there is none."""
    return next((axis for axis in _AXES if len(set(map(axis.value, rows))) > 1), _AXES[0])


def _panels(rows: Sequence[Row], axis: _Axis | None) -> dict[str, list[Row]]:
    """Rows by the title of their panel, which says all that may differ but the policy and x."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        said = [row.link]
        if axis is not None:
            said = [other.said.format(other.value(row)) for other in _AXES if other is not axis]
        title = f"{row.profile}{pipeline(row)}\n{', '.join(said)}"
        panels.setdefault(title, []).append(row)
    return panels


def _draw_distributions(axes: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        times = sorted(row.ttft_each_s)
        step = max(len(times) // _SHARES, 1)
        picked = sorted({*range(0, len(times), step), len(times) - 1})
        shares = [(at + 1) / len(times) for at in picked]
        axes.step([times[at] for at in picked], shares, where="post", **_style(row, marker=False))
    axes.set(xscale="log", xlabel="time to first token, s", ylim=(0, 1))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)


def _draw_means(axes: Any, rows: Sequence[Row], axis: _Axis) -> None:
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(label(row), []).append(row)
    for same in by_label.values():
        same.sort(key=axis.value)
        means = [row.ttft_s.mean for row in same]
        axes.plot([axis.value(row) for row in same], means, **_style(same[0], marker=True))
    ticks = sorted(set(map(axis.value, rows)))
    axes.set(xscale="log", yscale="log", xlabel=axis.name)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(_round_seconds())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)


def _round_seconds() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1, 2, 5))


def _describe(figure: Any, axes: Any, rows: Sequence[Row]) -> None:
    """What is drawn, and on whose costs, above; the policies below."""
    whose = " and ".join(sorted({row.simulated for row in rows}))
    what = "" if rows[0].batch else f"{rows[0].workload}: {rows[0].requests:,} requests, "
    figure.suptitle(f"{what}simulated {whose}", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _style(row: Row, *, marker: bool) -> dict[str, Any]:
    colour, shape, dashes = _STYLES[BatchPolicyName(row.policy)]
    return {
        "label": label(row),
        "color": colour,
        "linestyle": dashes,
        "marker": shape if marker else "",
        "markersize": 5,
    }


def _mean(values: Sequence[int]) -> float:
    return math.fsum(values) / len(values)
