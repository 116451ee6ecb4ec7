"""Figures of replays; needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheflow_sgl.replay.errors import ReplayError
from cacheflow_sgl.replay.report import Report

# Warm to cold: the nearer the tier, the darker; recomputed stands apart.
_TIERS = {
    "device": ("device", "#08519c"),
    "host": ("host", "#4292c6"),
    "storage": ("storage", "#9ecae1"),
    "cached_tier_unknown": ("cached, tier unknown", "#bdbdbd"),
    "recomputed": ("recomputed", "#e6550d"),
}


def require_matplotlib() -> None:
    """Raise ReplayError, with the mend, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ReplayError("plots need matplotlib: pip install 'cacheflow-sgl[plot]'")


def check_plot_name(path: Path) -> None:
    """Raise ReplayError where ``path`` does not end as a kind of figure that matplotlib writes."""
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        endings = ", ".join(f".{kind}" for kind in sorted(kinds))
        raise ReplayError(f"{path}: the name of a plot must end in one of {endings}")


def plot_runs(reports: Sequence[tuple[str, Report]], path: str | Path) -> None:
    """Write one figure of all runs to ``path``; the file's ending chooses the kind (png, svg, ..).

    Left: the cumulative distribution of TTFT, a line a run. Right: where the prompt tokens came
    from, a bar a run.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_ttft(left, reports)
    _draw_tokens(right, reports)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path}: cannot write the plot: {error}") from None


def _draw_ttft(axes: Any, reports: Sequence[tuple[str, Report]]) -> None:
    from matplotlib.ticker import LogLocator

    for label, report in reports:
        times = sorted(r.ttft_s for r in report.requests if r.error is None and r.ttft_s)
        if times:
            shares = [(index + 1) / len(times) for index in range(len(times))]
            axes.step([times[0], *times], [0.0, *shares], where="post", label=label)
            axes.set_xscale("log", subs=[])
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="time to first token (s)", ylabel="share of requests", ylim=(0, 1))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(loc="lower right")


def _draw_tokens(axes: Any, reports: Sequence[tuple[str, Report]]) -> None:
    labels = [label for label, _ in reports]
    positions = range(len(reports))
    bottoms = [0] * len(reports)
    for tier, (name, colour) in _TIERS.items():
        counts = [int(getattr(report.summary.tokens, tier)) for _, report in reports]
        if any(counts) or tier != "cached_tier_unknown":
            axes.bar(positions, counts, bottom=bottoms, label=name, color=colour, width=0.6)
            bottoms = [bottom + count for bottom, count in zip(bottoms, counts, strict=True)]
    axes.set_xticks(positions, labels)
    axes.set(ylabel="prompt tokens", xlim=(-1, len(reports)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False)
