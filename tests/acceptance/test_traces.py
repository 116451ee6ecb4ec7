"""Real traces replay through the `cacheflow` command, against a server with our backend.

The traces are not part of this repository. Their folder is named by the environment variable
`CACHEFLOW_TRACES`, by default `../shared/traces` beside the checkout:

    swe_agent/*.traj                     SWE-agent runs
    mooncake/conversation_trace.jsonl    the FAST'25 release
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheflow_sgl.client import ServerProcess
from cacheflow_sgl.cpu.tiny_model import Recipe, write_tiny_model
from cacheflow_sgl.replay import Report

REPOSITORY = Path(__file__).resolve().parents[2]
TRACES = Path(os.environ.get("CACHEFLOW_TRACES", REPOSITORY.parent / "shared" / "traces"))
TRAJECTORIES = sorted((TRACES / "swe_agent").glob("*.traj"))
MOONCAKE = TRACES / "mooncake" / "conversation_trace.jsonl"

pytestmark = [pytest.mark.engine, pytest.mark.full]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("traces")
    # Half the size of the tiny model: these traces are long, and what it says does not matter.
    model = write_tiny_model(directory / "model", Recipe(layers=2, hidden=128, heads=2, kv_heads=1))
    options = {"directory": str(directory / "pages"), "capacity": "20GB"}
    with ServerProcess(
        model,
        [
            "--enable-hierarchical-cache",
            *("--hicache-storage-backend", "cacheflow"),
            *("--hicache-storage-backend-extra-config", json.dumps(options)),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--page-size", "64"),
            *("--max-total-tokens", "65536"),
            *("--context-length", "32768"),
            "--enable-metrics",
        ],
        log_path=directory / "server.log",
    ) as running:
        yield running


def replay(server: ServerProcess, trace: Path, out: Path, *args: str) -> Report:
    """Run the command and give back its report."""
    command = [sys.executable, "-c", "from cacheflow_sgl.cli.main import main; main()", "replay"]
    command += ["--trace", str(trace), "--url", server.url, "--json", str(out), *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{server.log_tail()}"
    return Report.read(out)


@pytest.mark.skipif(not TRAJECTORIES, reason=f"no SWE-agent trace in {TRACES}")
@pytest.mark.parametrize("trace", TRAJECTORIES, ids=lambda path: path.stem)
def test_swe_agent_runs_replay_without_an_error(
    server: ServerProcess, trace: Path, tmp_path: Path
) -> None:
    """Turn by turn: each prompt extends the one before, so all but its news is reused."""
    report = replay(server, trace, tmp_path / "report.json", "--max-new-tokens", "4")
    summary = report.summary
    assert (summary.failed, summary.broken_lines) == (0, 0)
    turns = json.loads(trace.read_text())["history"]
    assert summary.succeeded == sum(turn["role"] == "assistant" for turn in turns) > 1
    assert all(record.recomputed < record.prompt_tokens for record in report.requests[1:])


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not MOONCAKE.is_file(), reason=f"no Mooncake trace in {TRACES}")
def test_mooncake_requests_replay_without_an_error(server: ServerProcess, tmp_path: Path) -> None:
    args = ["--limit", "200", "--scale", "0.25", "--arrival", "asap"]
    args += ["--concurrency", "4", "--max-new-tokens", "2"]
    report = replay(server, MOONCAKE, tmp_path / "report.json", *args)
    assert (report.summary.succeeded, report.summary.failed) == (200, 0)
    lengths = [record.prompt_tokens for record in report.requests]
    assert statistics.median(lengths) >= 2048
    assert max(lengths) >= 8192
    # Equal blocks are equal tokens: what the trace shares was found again.
    assert report.summary.tokens.recomputed < report.summary.input_tokens
