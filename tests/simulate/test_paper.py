"""The table of published figures, and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheflow_sgl.cli.main import app
from cacheflow_sgl.simulate import paper
from cacheflow_sgl.simulate.paper import Conditions, PaperRow, paper_rows, simulated
from cacheflow_sgl.simulate.show import paper_markdown

ROW = PaperRow(
    what="v1: 6k tokens, over recompute",
    grade="S",
    unit="x",
    published=1.1,
    simulated=1.5,
    difference=1.5 / 1.1 - 1,
    within=False,
    assumed="one GPU",
    common=1.3,
    why="the suffix",
)


def test_conditions_say_what_they_are_and_move_one_at_a_time() -> None:
    base = Conditions(batch=8, prompt_tokens=(6144, 30720), stages=2)
    assert str(base) == (
        "h100-qwen3-8b, 10 Gbps, prompts of 6144 to 30720 tokens, 256 of them new, batch 8, "
        "2 stages, exact"
    )
    moved = dict(base.moved())
    assert moved["20 Gbps"].gbps == 20
    for words, other in moved.items():
        differ = [
            name
            for name in ("profile", "gbps", "suffix_tokens", "batch", "prompt_tokens", "stages")
            if getattr(base, name) != getattr(other, name)
        ]
        assert len(differ) == 1, words
    assert {"l40s", "a100"} <= moved.keys()
    assert "h100" not in moved


def test_the_same_seed_draws_the_same_batch() -> None:
    conditions = Conditions(prompt_tokens=(6144, 30720), batch=3)
    lengths = [
        [each.prompt_tokens for each in simulated(conditions, paper._RECOMPUTE, seed).served]
        for seed in (0, 0, 1)
    ]
    assert lengths[0] == lengths[1] != lengths[2]
    assert all(6144 <= tokens <= 30720 for tokens in lengths[0])


@pytest.mark.parametrize(("simulated_x", "within"), [(1.149, True), (1.151, False), (0.849, False)])
def test_within_is_fifteen_percent(simulated_x: float, within: bool) -> None:
    row = paper._row(paper._Published("a", "S", "x", 1.0), simulated_x, "so", "why")
    assert row.within is within
    assert row.difference == pytest.approx(simulated_x - 1)


def test_markdown_holds_every_column() -> None:
    text = paper_markdown([ROW], "cacheflow simulate --paper", "2026-11-30")
    assert "Made by `cacheflow simulate --paper` on 2026-11-30" in text
    assert text.splitlines()[-1] == (
        "| v1: 6k tokens, over recompute | S | 1.1 x | 1.5 x | +36.4% | no | 1.3 x "
        "| one GPU | the suffix |"
    )


def test_the_command_prints_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cacheflow_sgl.cli.simulate_reports.paper_rows", lambda progress: [ROW])
    outputs = ["--json", str(tmp_path / "p.json"), "--markdown", str(tmp_path / "p.md")]
    done = CliRunner().invoke(app, ["simulate", "--paper", *outputs])
    assert done.exit_code == 0, done.output
    assert "0 of 1 figures within 15%" in done.output
    assert json.loads((tmp_path / "p.json").read_text())["rows"][0]["published"] == 1.1
    assert "| v1: 6k tokens" in (tmp_path / "p.md").read_text()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--paper", "--never-worse"], "two reports"),
        (["--paper", "--profile", "h100-qwen3-8b"], "--profile goes not with --paper"),
        (["--never-worse", "--batch", "4"], "--batch goes not with --never-worse"),
        (["--markdown", "x.md", "--profile", "h100-qwen3-8b"], "goes only with --paper"),
    ],
)
def test_reports_refuse_what_would_change_nothing(options: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, ["simulate", *options])
    assert done.exit_code == 2
    assert complaint in " ".join(done.output.split())


@pytest.mark.full
def test_the_seed_figures_come_out_and_the_committed_table_is_theirs() -> None:
    rows = paper_rows()
    missed = [row.what for row in rows if row.grade == "S" and not row.within]
    assert missed == ["FlowKV: 12k tokens, block-major alone, at least"]
    committed = (Path(__file__).parents[2] / "profiles" / "paper.md").read_text()
    table = paper_markdown(rows, "", "").partition("| figure")[2]
    assert table == committed.partition("| figure")[2]
