"""`cacheflow simulate --paper` and `--never-worse`: two reports with cases of their own."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cacheflow_sgl.files import write_atomically
from cacheflow_sgl.progress import progress_bar
from cacheflow_sgl.simulate.catalogue import named_profile, profile_names
from cacheflow_sgl.simulate.never_worse import NeverWorseRow, never_worse_rows, task_count
from cacheflow_sgl.simulate.paper import PaperRow, paper_rows
from cacheflow_sgl.simulate.rows import Environment
from cacheflow_sgl.simulate.show import never_worse_table, paper_markdown, paper_table

from .input import interruptible
from .output import console, error_console, fail, write_json


class PaperReport(msgspec.Struct, frozen=True):
    """What `--paper --json` writes."""

    environment: Environment
    rows: Sequence[PaperRow]


class NeverWorseReport(msgspec.Struct, frozen=True):
    """What `--never-worse --json` writes."""

    environment: Environment
    rows: Sequence[NeverWorseRow]


def paper(json: Path | None, markdown: Path | None) -> None:
    """Print every published figure beside the simulated one."""
    environment = Environment.now()
    try:
        with progress_bar(error_console) as bar, interruptible():
            task = bar.add_task("paper", total=None)
            rows = paper_rows(lambda done, of: bar.update(task, completed=done, total=of))
    except KeyboardInterrupt:
        fail("interrupted; nothing was written", 130)
    console.print(paper_table(rows))
    within = sum(row.within for row in rows)
    console.print(f"{within} of {len(rows)} figures within 15%; simulated on modelled profiles")
    write_json(json, PaperReport(environment, rows))
    if markdown is not None:
        command, date = shlex.join(environment.command), environment.date[:10]
        write_atomically(markdown, paper_markdown(rows, command, date).encode())


def never_worse(profiles: str | None, json: Path | None) -> None:
    """Run the grid, print the worst cases, and exit with 1 where one is beyond its limit."""
    environment = Environment.now()
    names = profiles.split(",") if profiles else profile_names()
    for name in names:
        named_profile(name)  # a wrong name is said before anything runs
    rows: list[NeverWorseRow] = []
    interrupted = False
    try:
        with progress_bar(error_console) as bar, interruptible():
            task = bar.add_task("never worse", total=task_count(names))
            for found in never_worse_rows(names, len(os.sched_getaffinity(0))):
                rows += found
                bar.advance(task)
    except KeyboardInterrupt:
        interrupted = True
    if rows:
        _report_worst(rows)
        write_json(json, NeverWorseReport(environment, rows))
    if interrupted:
        fail(f"interrupted; {len(rows)} cases were simulated", 130)
    worse = sum(row.worst > 1 for row in rows)
    if worse:
        fail(f"cacheflow is worse than it may be in {worse} of {len(rows)} cases", 1)


def _report_worst(rows: Sequence[NeverWorseRow]) -> None:
    console.print(never_worse_table(rows))
    worst = max(rows, key=lambda row: row.worst)
    console.print(
        f"{len(rows):,} cases; the worst: {worst.profile}, {worst.gbps:g} Gbps, "
        f"{worst.prefix_tokens:,} tokens, batch {worst.batch}, costs {worst.costs}: "
        f"mean {worst.mean_ratio:.3f}, p99 {worst.p99_ratio:.3f}, limit {worst.limit}"
    )
