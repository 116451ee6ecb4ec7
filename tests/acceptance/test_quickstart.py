"""scripts/quickstart.py from its start to its end, and ended before that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cacheflow_sgl.replay import Report

DRIVER = Path(__file__).resolve().parents[2] / "scripts" / "quickstart.py"

pytestmark = [pytest.mark.engine, pytest.mark.full]


def start(out: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, DRIVER, "--out", out, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes_with(log: Path) -> list[str]:
    """Ids of the processes that write to `log`, which all of a server's do."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "fd" / "1").readlink() == log:
                found.append(process.name)
        except OSError:
            continue  # it ended, or is not ours to look into
    return found


def test_it_restores_from_disk_after_a_flush_and_after_a_restart(tmp_path: Path) -> None:
    out = tmp_path / "a folder" / "results"
    process = start(out)
    said, _ = process.communicate(timeout=800)
    assert process.returncode == 0, said
    storage = {}
    for run in ["new", "after-flush", "after-restart"]:
        summary = Report.read(out / f"{run}.json").summary
        assert summary.failed == 0
        storage[run] = summary.tokens.storage
        assert run.replace("-", " ") in said
    assert storage["after-flush"] > 0
    assert storage["after-restart"] > 0
    assert (out / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert not processes_with(out / "server.log")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_signal_stops_the_server_too(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "server.log"
    process = start(tmp_path)
    deadline = time.monotonic() + 120
    while not log.exists() or not log.stat().st_size:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    assert processes_with(log)
    os.kill(process.pid, number)
    os.kill(process.pid, number)  # an impatient second time
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "quickstart: interrupted; the server is stopped"
    assert not processes_with(log)


def test_a_server_that_cannot_start_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = start(tmp_path, "--", "--no-such-flag")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "quickstart: the server ended with status 2" in said
    assert said.splitlines()[-1].endswith("unrecognized arguments: --no-such-flag")
    assert not processes_with(tmp_path / "server.log")
