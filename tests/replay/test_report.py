"""The report: its figures, its file, its tables and its plot."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cacheflow_sgl.replay import (
    ReplayError,
    Report,
    RequestRecord,
    Stats,
    compare_table,
    plot_runs,
    print_report,
)
from cacheflow_sgl.replay.client import Answer
from cacheflow_sgl.replay.prompts import RawPrompt
from cacheflow_sgl.replay.report import Environment, summarize
from cacheflow_sgl.replay.trace import Request

REQUEST = Request("session", 0, RawPrompt("x"))


def record(answer: Answer) -> RequestRecord:
    return RequestRecord.of(REQUEST, answer, arrival_s=None, sent_s=0.0, late_s=0.0)


def report(*records: RequestRecord, planned: int | None = None, broken: int = 0) -> Report:
    planned = len(records) if planned is None else planned
    return Report(
        environment=Environment(
            trace="[trace]",
            format="mooncake",
            url="http://127.0.0.1:30000",
            started="2026-01-01T00:00:00+00:00",
            cacheflow_version="0",
            python="3",
            options={},
            server={},
        ),
        summary=summarize(
            records,
            planned=planned,
            duration_s=2.0,
            interrupted=planned > len(records),
            broken_lines=broken,
        ),
        requests=list(records),
    )


def answered(ttft: float, prompt: int = 1000, **tiers: int) -> RequestRecord:
    return record(
        Answer(
            ttft_s=ttft,
            ttlt_s=ttft + 0.3,
            first_tokens=1,
            output_tokens=4,
            prompt_tokens=prompt,
            cached_tokens=sum(tiers.values()),
            details=dict(tiers),
            finished=True,
        )
    )


tokens = st.integers(0, 1000)


@given(tokens, tokens, tokens, tokens, tokens, st.booleans())
def test_token_counts_add_up_to_the_prompt(
    device: int, host: int, storage: int, unknown: int, recomputed: int, told: bool
) -> None:
    cached = device + host + storage + unknown
    details = {"device": device, "host": host, "storage": storage} if told else {}
    made = record(Answer(prompt_tokens=cached + recomputed, cached_tokens=cached, details=details))
    assert made.recomputed == recomputed
    assert made.cached_tier_unknown == (unknown if told else cached)
    parts = (made.device, made.host, made.storage, made.cached_tier_unknown, made.recomputed)
    assert sum(parts) == made.prompt_tokens


def test_figures() -> None:
    failed = record(Answer(ttft_s=99.0, prompt_tokens=7, error="abort", message="gone"))
    good = [answered(n / 100, device=200, host=100) for n in range(1, 101)]
    summary = report(*good, failed, planned=103, broken=2).summary
    assert (summary.requests, summary.succeeded, summary.failed) == (103, 100, 1)
    assert (summary.not_sent, summary.interrupted, summary.broken_lines) == (2, True, 2)
    assert summary.input_tokens == 100_000
    assert (summary.output_tokens, summary.output_tokens_per_s) == (400, 200.0)
    assert summary.ttft_s.mean == pytest.approx(0.505)
    assert summary.ttft_s.p50 == pytest.approx(0.505)
    assert summary.ttft_s.p99 == pytest.approx(0.9901)
    assert summary.ttft_s.max == pytest.approx(1.0)
    assert summary.tpot_s.p50 == pytest.approx(0.1)
    assert summary.ttlt_s.p50 == pytest.approx(0.805)
    assert (summary.tokens.device, summary.tokens.host) == (20_000, 10_000)
    assert [(e.kind, e.count, e.first) for e in summary.errors] == [("abort", 1, "gone")]


def test_nothing_measured() -> None:
    assert Stats.of([None]) == Stats()
    assert record(Answer(ttft_s=1.0, ttlt_s=1.0, first_tokens=1, output_tokens=1)).tpot_s is None
    print_report(report(), Console(width=80, file=io.StringIO()))


def test_written_report_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("what was there")
    made = report(answered(0.1, storage=500))
    made.write(path)
    assert Report.read(path) == made
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_reports_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ReplayError, match="cannot write the report"):
        report().write(tmp_path / "folder")
    with pytest.raises(ReplayError, match="cannot write the report"):
        report().write(tmp_path / "none" / "x.json")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    (tmp_path / "x.json").write_text('{"rows": []}')
    with pytest.raises(ReplayError, match="not a replay report"):
        Report.read(tmp_path / "x.json")


def shown(*parts: object) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    for part in parts:
        if isinstance(part, Report):
            print_report(part, console)
        else:
            console.print(part)
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text  # nothing cut off
    return text


def test_a_report_shows_everything_in_80_columns() -> None:
    big = [answered(1234.5678, 987_654_321, device=900_000_000, host=1, storage=87_000_000)] * 3
    failed = record(Answer(error="http 500", message="[bad] " + "luck " * 50))
    text = shown(report(*big, failed, planned=9, broken=3))
    for expected in (
        "[trace] (mooncake) against http://127.0.0.1:30000",
        "3 of 9",
        "1,234.6",
        "2,962,962,963",
        "91.1%",
        "http 500",
        "[bad] luck",
        "interrupted: 5 of 9 requests not completed",
    ):
        assert expected in text


def test_an_unknown_tier_is_shown_only_where_there_is_one() -> None:
    known, unknown = report(answered(1.0, device=500)), report(answered(1.0, elsewhere=500))
    assert "tier unknown" not in shown(known)
    assert "cached, tier unknown │    500" in shown(unknown)
    assert "cached │ recomputed" not in shown(compare_table([("a", known)])).replace("┃", "│")
    assert "cached ┃ recomputed" in shown(compare_table([("a", known), ("b", unknown)]))


def test_runs_side_by_side() -> None:
    cold = report(answered(2.0))
    warm = report(answered(0.05, storage=900))
    text = shown(compare_table([("cold", cold), ("after restart", warm)]))
    rows = [line.replace("│", " ").split() for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["cold", "2,000", "2,000", "0", "0", "0", "1,000"],
        ["after", "restart", "50.0", "50.0", "0", "0", "900", "100"],
    ]


def test_plot_of_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [("cold", report(answered(2.0))), ("warm", report(answered(0.05, storage=900)))]
    plot_runs(runs, tmp_path / "runs.svg")
    plot_runs([("empty", report())], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "runs.svg").read_text().count("<svg") == 1
    with pytest.raises(ReplayError, match="cannot write the plot"):
        plot_runs(runs, tmp_path / "runs.doc")
