"""The command: exit codes, one-line errors, and Ctrl-C without loss."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from cacheflow_sgl.cli.replay import replay
from cacheflow_sgl.replay import Report
from tests.replay.sglang_stand import SglangStand

app = typer.Typer()
app.command()(replay)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "80"})


def prompts(write: Callable[..., Path], *texts: str) -> Path:
    return write("requests.jsonl", *(json.dumps({"prompt": text}) for text in texts))


def test_demo_with_all_outputs(stand: SglangStand, tmp_path: Path) -> None:
    out = ("--json", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    result = invoke("--url", stand.url, "--trace", "demo", *out)
    assert result.exit_code == 0, result.output
    assert "demo (mini-swe-agent)" in result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written) == {"environment", "summary", "requests"}
    assert len(written["requests"]) == 23
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_request_is_exit_code_1(
    stand: SglangStand, trace_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = prompts(trace_file, "fine", "%500")
    result = invoke("--url", stand.url, "--trace", path, "--json", tmp_path / "out.json")
    assert result.exit_code == 1
    assert "http 500" in result.output
    assert Report.read(tmp_path / "out.json").summary.failed == 1


def test_broken_lines_are_reported(stand: SglangStand, trace_file: Callable[..., Path]) -> None:
    path = trace_file("r.jsonl", '{"prompt": "a"}', *["{broken"] * 7)
    result = invoke("--url", stand.url, "--trace", path)
    assert result.exit_code == 0
    assert "skipped r.jsonl:2: not JSON" in result.stderr
    assert "skipped 2 more broken lines" in result.stderr
    assert re.search(r"broken trace lines, skipped │ +7 │", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "none.jsonl"), "no such file or folder"),
        (("--url", "127.0.0.1:9"), "no server at http://127.0.0.1:9 (Connection refused); start"),
        (("--url", "a.invalid"), "no server at http://a.invalid ("),
        (("--url", "ftp://a"), "--url: 'ftp://a' is no URL of a server; write http://HOST:PORT"),
        (("--url", "http://"), "--url: 'http://' is no URL"),
        (("--url", "a:99999"), "--url: 'http://a:99999' is no URL"),
        (("--json", "/none/out.json"), "not a file in an existing folder"),
        (("--json", "/proc/out.json"), "/proc/out.json: cannot write to its folder: "),
        (("--plot", "/"), "not a file in an existing folder"),
        (("--plot", "/none/out.png"), "not a file in an existing folder"),
        (("--plot", "/proc/out.png"), "/proc/out.png: cannot write to its folder: "),
        (("--plot", "out.xyz"), "out.xyz: the name of a plot must end in one of ."),
        (("--plot", "out"), "out: the name of a plot must end in one of ."),
        (("--format", "lmsys"), "lmsys: no 'conversation'; it looks like mini-swe-agent"),
        (("--speed", 0), "--speed must be positive"),
        (("--shared-context-tokens", -1), "--shared-context-tokens must be 0 or more"),
        (("--scale", 0.5), "--scale needs prompts made of hash ids"),
    ],
)
def test_what_cannot_start_is_one_line_and_exit_code_2(
    stand: SglangStand, arguments: tuple[object, ...], message: str
) -> None:
    result = invoke("--url", stand.url, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "ssl" not in result.stderr
    assert stand.bodies == []


def test_a_url_needs_no_scheme(stand: SglangStand) -> None:
    result = invoke("--url", stand.url.removeprefix("http://") + "/", "--limit", 1)
    assert result.exit_code == 0, result.output
    assert f"against {stand.url}\n" in result.stdout


def test_a_report_that_cannot_be_written_is_still_shown(stand: SglangStand) -> None:
    result = invoke("--url", stand.url, "--limit", 1, "--json", "/dev/full")
    assert result.exit_code == 2
    assert "cannot write the report" in result.stderr
    assert "1 of 1" in result.stdout


def test_what_was_skipped_in_a_folder_is_one_line(
    stand: SglangStand, trace_file: Callable[..., Path]
) -> None:
    path = prompts(trace_file, "a")
    trace_file("README.md", "about it")
    result = invoke("--url", stand.url, "--trace", path.parent)
    assert result.exit_code == 0
    note = "note: read as openai-jsonl: requests.jsonl; skipped: README.md"
    assert result.stderr.splitlines() == [note]


def test_checking_where_a_report_goes_leaves_nothing_there(
    stand: SglangStand, tmp_path: Path
) -> None:
    outputs = ("--json", tmp_path / "out.json", "--plot", tmp_path / "out.PNG")
    result = invoke("--url", stand.url, "--trace", "none.jsonl", *outputs)
    assert "no such file or folder" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_and_writes_what_there_is(
    stand: SglangStand, trace_file: Callable[..., Path], tmp_path: Path, number: signal.Signals
) -> None:
    code = "import typer; from cacheflow_sgl.cli.replay import replay; typer.run(replay)"
    path = prompts(trace_file, "done", "%slow", "never")
    arguments = ["--trace", str(path), "--url", stand.url, "--concurrency", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--json", str(tmp_path / "out.json")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    try:
        assert stand.slow_started.wait(60)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted: 2 of 3 requests not completed" in output
    summary = Report.read(tmp_path / "out.json").summary
    assert (summary.succeeded, summary.not_sent, summary.interrupted) == (1, 2, True)


def test_help_teaches() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert "cacheflow replay --trace demo --json first.json" in result.output
