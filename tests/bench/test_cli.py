"""`cacheflow bench restore` without a server: arguments, tables, files, exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cacheflow_sgl.bench.environment import Environment
from cacheflow_sgl.bench.options import RestoreOptions
from cacheflow_sgl.bench.protocol import BenchError
from cacheflow_sgl.bench.rows import Row
from cacheflow_sgl.bench.server import bench_server, server_flags
from cacheflow_sgl.bench.show import print_rows
from cacheflow_sgl.bench.stats import Spread
from cacheflow_sgl.cli import bench as command
from cacheflow_sgl.cli.main import app
from cacheflow_sgl.cli.serve import Hardware


def row(**changes: object) -> Row:
    figures: dict[str, object] = {
        "policy": "cacheflow",
        "balance": 1.0,
        "balance_reached": 0.98,
        "prefix_tokens": 4096,
        "suffix_tokens": 64,
        "ttft_s": Spread(0.81, 0.8, 0.95, 0.75, 1.25, 15),
        "ttft_each_s": [0.8] * 15,
        "bound_s": 0.7,
        "ratio_to_bound": 1.08,
        "ratio_to_bound_interval": (1.05, 1.11),
        "best_single": "recompute",
        "ratio_to_best_single": 0.52,
        "ratio_to_best_single_interval": (0.5, 0.55),
        "restore_s": 0.7,
        "choice": "split 14, load 1",
        "reason": "split saves 45%",
        "throttle_bytes_per_s": 1e7,
        "lane_rate_reached": 0.99,
        "void": False,
        "meet_tokens": 2112.0,
        "outputs_equal": True,
        "max_abs_dlogprob": 1.2e-6,
        "compute_busy": 0.93,
        "io_busy": 0.88,
        "lane_overlap": 0.97,
        "compute_slowdown": 1.02,
        "io_slowdown": 1.0,
    }
    return Row(**figures | changes)  # type: ignore[arg-type]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RestoreOptions]:
    """The options of what would have been measured, on a CPU, with `row()` as its result."""
    options: list[RestoreOptions] = []

    def measure(chosen: RestoreOptions, *, on_cpu: bool) -> Iterator[list[Row]]:
        assert on_cpu
        options.append(chosen)
        yield [row()]

    monkeypatch.setattr(command, "bench_restore", measure)
    monkeypatch.setattr(command, "detect_hardware", lambda: Hardware(None, (0, 1)))
    return options


def invoke(*arguments: object):
    return CliRunner().invoke(
        app, ["bench", "restore", *map(str, arguments)], env={"COLUMNS": "80"}
    )


def shown(rows: list[Row]) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_rows(Environment.now("tiny model", on_cpu=True), rows, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_lists_take_commas(asked: list[RestoreOptions]):
    result = invoke(
        *("--policies", "recompute,cake", "--balance", "1,0.5", "--prefix-tokens", "512,1024"),
        *("--no-overlap", "--decode", 3, "--repeats", 2, "--seed", 5),
    )
    assert result.exit_code == 0, result.output
    assert asked == [
        RestoreOptions(
            policies=("recompute", "cake"),
            balances=(1.0, 0.5),
            prefix_tokens=(512, 1024),
            overlap=False,
            decodes=3,
            repeats=2,
            seed=5,
        )
    ]


def test_the_defaults_are_those_of_the_options(asked: list[RestoreOptions]):
    assert invoke().exit_code == 0
    assert asked == [RestoreOptions()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tier", "disk"], "--tier disk is not there yet; it can be: host"),
        (["--batch", 4], "--batch 4 is not there yet; it can be: 1"),
        (["--policies", "recompute,fast"], "--policies: 'fast' is none of recompute, load, cake"),
        (["--balance", "1,x"], "--balance: '1,x' is not a number or a list of them"),
        (["--balance", "0"], "--balance: each must be above 0"),
        (["--balance", "nan"], "--balance: each must be above 0"),
        (["--prefix-tokens", "1000"], "--prefix-tokens: 1000 is not two or more whole pages of 64"),
        (["--prefix-tokens", "64"], "--prefix-tokens: 64 is not two or more whole pages of 64"),
        (["--suffix-tokens", 65], "--suffix-tokens is 65; it must be 1 to 64 (--page)"),
        (["--chunk", 100], "--chunk is 100; it must be a multiple of --page"),
        (["--repeats", 0], "--repeats must be at least 1"),
    ],
)
def test_wrong_arguments_are_one_line(
    asked: list[RestoreOptions], arguments: list[object], message: str
):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"cacheflow: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert asked == []


def test_a_gpu_needs_a_model(asked: list[RestoreOptions], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "detect_hardware", lambda: Hardware("cuda", (0, 1)))
    assert invoke().exit_code == 2
    assert "--model is missing" in invoke().stderr


def test_a_server_that_fails_is_one_line(
    asked: list[RestoreOptions], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def measure(*_: object, **__: object) -> Iterator[list[Row]]:
        yield from ()
        raise BenchError("the server did not evict")

    monkeypatch.setattr(command, "bench_restore", measure)
    result = invoke("--json", tmp_path / "out.json")
    assert (result.exit_code, result.stderr) == (2, "cacheflow: the server did not evict\n")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("end", "status"), [(BenchError("the server did not evict"), 2), (KeyboardInterrupt(), 130)]
)
def test_what_was_measured_before_an_end_is_not_lost(
    asked: list[RestoreOptions],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    end: BaseException,
    status: int,
):
    def measure(*_: object, **__: object) -> Iterator[list[Row]]:
        yield [row()]
        raise end

    monkeypatch.setattr(command, "bench_restore", measure)
    result = invoke("--json", tmp_path / "out.json")
    assert result.exit_code == status
    assert "4096 tokens on the host" in result.stdout
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 1


def test_a_bench_that_is_told_to_end_ends_its_server(
    asked: list[RestoreOptions], monkeypatch: pytest.MonkeyPatch
):
    ended: list[str] = []

    def measure(*_: object, **__: object) -> Iterator[list[Row]]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
            yield [row()]
        finally:
            ended.append("server")

    monkeypatch.setattr(command, "bench_restore", measure)
    before = signal.getsignal(signal.SIGTERM)
    assert invoke().exit_code == 130
    assert ended == ["server"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_json_file_has_what_the_table_has(asked: list[RestoreOptions], tmp_path: Path):
    out = tmp_path / "new" / "out.json"
    assert invoke("--json", out).exit_code == 0
    content = json.loads(out.read_text())
    assert content.keys() == {"environment", "rows"}
    assert content["environment"]["versions"]["sglang"] == "0.5.23"
    assert len(content["environment"]["load_average"]) == 3
    (written,) = content["rows"]
    assert written["ttft_s"] == {
        "mean": 0.81,
        "median": 0.8,
        "p95": 0.95,
        "min": 0.75,
        "max": 1.25,
        "n": 15,
    }
    for name in ("mode", "tier", "batch", "tp", "pp", "boundary", "meet_tokens", "io_busy"):
        assert name in written


@pytest.mark.parametrize("bad", [{"void": True}, {"outputs_equal": False}])
def test_rows_that_cannot_be_relied_on_are_exit_code_one(
    asked: list[RestoreOptions], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: dict
):
    monkeypatch.setattr(
        command, "bench_restore", lambda *_, **__: (each for each in [[row(**bad)]])
    )
    out = tmp_path / "out.json"
    assert invoke("--json", out).exit_code == 1
    assert out.exists()  # what is wrong can be looked into


def test_the_table_fits_80_columns_and_hides_nothing():
    slow = Spread(98.1, 98.2, 99.0, 97.3, 99.4, 15)
    text = shown([row(policy="recompute", ttft_s=slow, choice="recompute"), row()])
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for piece in ("98,200", "97,300-99,400", "0.52", "0.50-0.55", "1.05-1.11", "2112", "93%"):
        assert piece in text
    assert "4096 tokens on the host, balance 1 (reached 0.98)" in text


def test_each_balance_has_a_table_of_its_own():
    text = shown([row(), row(balance=2.0), row(balance=2.0, policy="load")])
    assert text.count("tokens on the host, balance") == 2
    assert "decodes" not in text


def test_decodes_are_shown_where_there_are_some():
    text = shown(
        [
            row(
                decodes=4,
                decode_tpot_s=0.05,
                decode_tokens_per_s=80.0,
                decode_tpot_ratio_to_recompute=0.4,
                decode_tpot_ratio_to_recompute_interval=(0.3, 0.5),
                decode_tpot_ratio_to_load=1.1,
                decode_tpot_ratio_to_load_interval=(1.0, 1.2),
            )
        ]
    )
    assert "4 decodes beside these restores" in text
    for piece in ("50.0", "80.0", "0.30-0.50", "1.00-1.20"):
        assert piece in text


def test_faults_are_said_below_the_table():
    text = shown([row(void=True, lane_rate_reached=0.9), row(policy="cake", outputs_equal=False)])
    assert "void: at 4096 tokens, balance 1, load reached 0.90 of the throttle" in text
    assert "wrong: at 4096 tokens, balance 1, an output of cake differs" in text


def flag(flags: tuple[str, ...], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_the_server_has_room_for_every_prefix(tmp_path: Path):
    options = RestoreOptions(prefix_tokens=(1024, 8192), decodes=2, chunk=256, overlap=False)
    flags = server_flags(options, tmp_path, on_cpu=True)
    device = int(flag(flags, "--max-total-tokens"))
    assert device % 64 == 0
    assert device >= 3 * 8192 + 2 * 4096
    assert int(flag(flags, "--hicache-ratio")) * device >= 2 * (1024 + 8192)
    assert (flag(flags, "--page-size"), flag(flags, "--chunked-prefill-size")) == ("64", "256")
    assert "--disable-overlap-schedule" in flags
    assert json.loads(flag(flags, "--hicache-storage-backend-extra-config")) == {
        "directory": str(tmp_path)
    }


def test_on_a_gpu_layout_and_transfer_are_sglangs_own(tmp_path: Path):
    flags = server_flags(RestoreOptions(), tmp_path, on_cpu=False)
    assert not {"--hicache-io-backend", "--disable-overlap-schedule"} & {*flags}


def test_many_prefixes_make_the_host_pool_grow(tmp_path: Path):
    options = RestoreOptions(prefix_tokens=(4096,) * 20)
    flags = server_flags(options, tmp_path, on_cpu=True)
    host = int(flag(flags, "--hicache-ratio")) * int(flag(flags, "--max-total-tokens"))
    assert host >= 2 * 20 * 4096


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_server_is_told_where_its_control_is(tmp_path: Path, on_cpu: bool):
    server = bench_server("m", RestoreOptions(), tmp_path, tmp_path / "settings", on_cpu=on_cpu)
    env = {"CACHEFLOW_BENCH_CONTROL": str(tmp_path / "settings")}
    assert server._env == env | ({"SGLANG_CPU_OMP_THREADS_BIND": "0"} if on_cpu else {})


def test_help_teaches():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "cacheflow bench restore --balance 1,0.5,2 --json restore.json" in result.output
