"""The grid that asks whether cacheflow is ever worse than a single way, and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheflow_sgl.cli.main import app
from cacheflow_sgl.core.profiles import TableCost
from cacheflow_sgl.simulate import never_worse
from cacheflow_sgl.simulate.catalogue import named_profile, profile_names
from cacheflow_sgl.simulate.never_worse import (
    EXACT_LIMIT,
    NeverWorseRow,
    never_worse_rows,
    scaled,
)

KINDS = {
    "exact",
    "compute -20% link -20%",
    "compute -20% link +20%",
    "compute +20% link -20%",
    "compute +20% link +20%",
    "link halves",
}


def row(**facts: object) -> NeverWorseRow:
    plain = {
        "profile": "h100-qwen3-8b",
        "gbps": 10.0,
        "prefix_tokens": 512,
        "batch": 1,
        "costs": "exact",
        "mean_ratio": 0.9,
        "p99_ratio": 0.9,
        "limit": EXACT_LIMIT,
    }
    return NeverWorseRow(**plain | facts)


def test_a_scaled_profile_takes_so_much_longer() -> None:
    _, profile = named_profile("h100-qwen3-8b")
    plain, slow = TableCost(profile), TableCost(scaled(profile, 1.2))
    for start, rows in ((0, 512), (20000, 512), (4096, 100)):
        assert slow.seconds(start, rows) == pytest.approx(1.2 * plain.seconds(start, rows))


@pytest.mark.parametrize("profile", ["h100-qwen3-8b", "l40s-llama-3.1-8b"])
def test_it_is_never_worse_at_moderate_lengths(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(never_worse, "LENGTHS", (512, 2048, 8192))
    monkeypatch.setattr(never_worse, "BATCHES", (1, 4))
    found = list(never_worse_rows([profile], workers=1))
    rows = [row for group in found for row in group]
    assert len(found) == never_worse.task_count([profile])
    assert {row.costs for row in rows} == KINDS
    assert len(rows) == len(found) * 3 * 2 * len(KINDS)
    assert [row for row in rows if row.worst > 1] == []
    assert min(row.mean_ratio for row in rows) < 0.75, "and mostly much better"


def test_worst_is_the_larger_ratio_over_the_limit() -> None:
    assert row(mean_ratio=1.0, p99_ratio=1.05, limit=1.05).worst == pytest.approx(1)
    assert row(mean_ratio=1.1, p99_ratio=1.0, limit=1.0).worst == pytest.approx(1.1)


@pytest.mark.parametrize(("p99_ratio", "status"), [(1.0, 0), (1.03, 1)])
def test_the_command_tells_and_fails_where_one_is_worse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, p99_ratio: float, status: int
) -> None:
    found = [[row(), row(p99_ratio=p99_ratio, batch=16)]]
    reports = "cacheflow_sgl.cli.simulate_reports"
    monkeypatch.setattr(f"{reports}.never_worse_rows", lambda names, workers: iter(found))
    out = tmp_path / "n.json"
    done = CliRunner().invoke(app, ["simulate", "--never-worse", "--json", str(out)])
    assert done.exit_code == status, done.output
    assert "the worst: h100-qwen3-8b, 10 Gbps, 512 tokens, batch 16" in " ".join(
        done.output.split()
    )
    assert len(json.loads(out.read_text())["rows"]) == 2


def test_an_unknown_profile_is_one_line() -> None:
    done = CliRunner().invoke(app, ["simulate", "--never-worse", "--profile", "b200"])
    assert done.exit_code == 2
    assert "no profile 'b200'" in done.output


@pytest.mark.full
@pytest.mark.xfail(strict=True, reason="a few cases are beyond their limits: see the README")
def test_it_is_never_worse() -> None:
    rows = [row for group in never_worse_rows(profile_names(), workers=2) for row in group]
    assert [row for row in rows if row.worst > 1] == []
