"""`cacheflow simulate` as a person runs it: options, tables, files, exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheflow_sgl.cli import simulate as command
from cacheflow_sgl.cli.main import app
from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.simulator.result import Result
from cacheflow_sgl.simulate.catalogue import profile_names
from cacheflow_sgl.simulate.runs import Run, SimulationError

TRACE = [
    {
        "timestamp": 500 * at,
        "input_length": 3000,
        "output_length": 2,
        "hash_ids": [0, 1, 2, at, 9, 9],
    }
    for at in range(10, 20)
]


def invoke(*arguments: object, profile: str = "h100-qwen3-8b"):
    words = ["simulate", "--profile", profile, *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "80"})


def rows(*arguments: object, tmp_path: Path, profile: str = "h100-qwen3-8b") -> list[dict]:
    result = invoke(*arguments, "--json", tmp_path / "out.json", profile=profile)
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "out.json").read_text())["rows"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, TRACE)))
    return path


def test_every_combination_is_a_row(tmp_path: Path):
    found = rows(
        *("--prefix-tokens", "1024,2048", "--batch", "1,2", "--bandwidth-gbps", "10,40"),
        *("--policy", "load,longest,load", "--pp", "1,2", "--boundary", "exact,off"),
        profile="h100-qwen3-8b,a100-qwen3-8b",
        tmp_path=tmp_path,
    )
    keys = ("profile", "pp", "boundary", "bandwidth_gbps", "prefix_tokens", "batch", "policy")
    combinations = {tuple(str(row[key]) for key in keys) for row in found}
    # One stage has no boundary, so it is one pipeline; a policy named twice is one.
    assert len(combinations) == len(found) == 2 * 3 * 2 * 2 * 2 * 2
    assert {row["simulated"] for row in found} == {"on a modelled profile"}


def test_the_same_command_gives_the_same_rows(tmp_path: Path):
    words = ("--prefix-tokens", "1024,2048,4096", "--mixed", "--batch", "5", "--seed")
    first, again, other = (rows(*words, seed, tmp_path=tmp_path) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [row["workload"] for row in first] == ["1024-4096 x 5"] * 4
    assert first[0]["prefix_tokens"] == [1024, 2048, 4096]


def test_the_defaults_compare_four_policies(tmp_path: Path):
    found = rows(tmp_path=tmp_path)
    assert [row["policy"] for row in found] == ["recompute", "load", "cake", "cacheflow"]
    assert {(row["workload"], row["link"], row["engine"]) for row in found[3:]} == {
        ("8192 x 1", "10 Gbps", "staircase")
    }
    assert found[3]["ratio_to_best_single"] < 1
    environment = json.loads((tmp_path / "out.json").read_text())["environment"]
    assert environment.keys() == {"command", "date", "versions", "processor", "cpus"}


def test_tiers_are_those_of_the_profile(tmp_path: Path):
    found = rows("--tier", "host,disk", "--policy", "load", tmp_path=tmp_path)
    assert [row["link"] for row in found] == ["host", "disk"]
    assert found[0]["ttft_s"]["mean"] < found[1]["ttft_s"]["mean"]


def test_an_engine_is_for_the_policies_without_one(tmp_path: Path):
    found = rows("--policy", "cake,longest", "--engine", "v1", tmp_path=tmp_path)
    assert [row["engine"] for row in found] == ["cake", "v1"]


def test_engines_share_a_table_and_own_ones_come_once(tmp_path: Path):
    words = ("--policy", "load,cacheflow,fifo", "--engine", "recompute,staircase,load")
    found = rows(*words, "--batch", 2, tmp_path=tmp_path)
    names = [(row["policy"], row["engine"]) for row in found]
    assert names == [
        ("load", "load"),
        *(
            (policy, engine)
            for policy in ("cacheflow", "fifo")
            for engine in ("recompute", "staircase", "load")
        ),
    ]
    for row in found:
        if row["engine"] == "recompute":
            assert row["tokens"]["loaded"] == 0
        if row["engine"] == "load":
            assert row["tokens"]["loaded"] == 2 * 8192
        # Also where other rows load and nothing else: they are no policy of a single way.
        assert row["best_single"] == "load"
        ratio = row["ttft_s"]["mean"] / found[0]["ttft_s"]["mean"]
        assert row["ratio_to_best_single"] == pytest.approx(ratio)
    table = invoke(*words, "--batch", 2).stdout
    labels = [line[2:24].strip() for line in table.splitlines() if line.startswith("   ")]
    labels = [*filter(None, labels)]
    assert labels == [
        "load",
        *("cacheflow recompute", "cacheflow", "cacheflow load"),
        *("fifo recompute", "fifo", "fifo load"),
    ]


def test_only_several_stages_have_a_boundary(tmp_path: Path):
    found = rows("--pp", "1,2", "--boundary", "off", "--policy", "load", tmp_path=tmp_path)
    assert [(row["pp"], row["boundary"]) for row in found] == [(1, None), (2, "off")]


def test_a_trace_is_served_at_its_times(tmp_path: Path, trace: Path):
    found = rows("--trace", trace, tmp_path=tmp_path)
    assert {(row["workload"], row["requests"], row["batch"]) for row in found} == {
        ("trace.jsonl", 10, None)
    }
    assert all(row["tokens"]["device"] > 0 for row in found), "three blocks are shared"
    assert found[0]["end_s"] > 4.5
    (fast,) = rows("--trace", trace, "--speed", 10, "--policy", "load", tmp_path=tmp_path)
    assert fast["end_s"] < found[1]["end_s"] - 3
    assert "overloaded" not in invoke("--trace", trace, "--policy", "load").stdout
    (few,) = rows("--trace", trace, "--requests", 3, "--policy", "load", tmp_path=tmp_path)
    assert few["requests"] == 3


def test_what_the_caches_hold_matters(tmp_path: Path, trace: Path):
    words = ("--trace", trace, "--policy", "load", "--device-tokens", 512)
    (endless,) = rows(*words, tmp_path=tmp_path)
    (small,) = rows(*words, "--host-tokens", 512, tmp_path=tmp_path)
    assert endless["tokens"]["loaded"] > small["tokens"]["loaded"]


def test_the_device_also_limits_what_runs_at_once(tmp_path: Path, trace: Path):
    words = ("--trace", trace, "--speed", 1000, "--policy", "recompute", "--device-tokens")
    narrow, wide = (rows(*words, tokens, tmp_path=tmp_path)[0] for tokens in (3002, 200_000))
    lasts = [row["ttft_each_s"][-1] for row in (narrow, wide)]
    assert lasts[0] > lasts[1]


def test_a_trace_that_comes_too_fast_says_so(tmp_path: Path):
    lines = [
        {"timestamp": 500 * at, "input_length": 120_000, "output_length": 1, "hash_ids": ids}
        for at in range(4)
        for ids in [[1000 * at + block for block in range(235)]]
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    words = ("--trace", path, "--policy", "recompute,load")
    text = invoke(*words).stdout
    (line,) = (line for line in text.splitlines() if "--speed" in line)
    assert line == text.splitlines()[-1]
    start, end = "2 of 2 rows overloaded: 2 s of arrivals, ", " s more; lower --speed"
    assert line.startswith(start), line
    assert line.endswith(end), line
    assert "--speed" not in invoke(*words, "--speed", 0.01).stdout


def test_lengths_of_text_are_said_to_be_estimates(tmp_path: Path):
    result = invoke("--trace", "demo", "--requests", 4, "--arrival", "closed", "--policy", "load")
    assert result.exit_code == 0, result.output
    assert "demo (text, 4 bytes a token), 4 requests" in result.stdout


def test_the_table_says_what_it_stands_on():
    result = invoke("--pp", 2, "--policy", "load")
    assert "`--engine recompute,load`" in result.stdout
    assert result.stdout.startswith("simulated on a modelled profile: h100-qwen3-8b")
    assert "2 stages, boundary exact" in result.stdout
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "load,fast"], "--policy: 'fast' is none of recompute, load, cake, fifo"),
        (["--bandwidth-gbps", "10,x"], "--bandwidth-gbps: '10,x' is not a number or a list"),
        (["--bandwidth-gbps", "0"], "--bandwidth-gbps: 0.0 is not above 0"),
        (["--bandwidth-gbps", "nan"], "--bandwidth-gbps: nan is not above 0"),
        (["--bandwidth-gbps", "inf"], "--bandwidth-gbps: inf is not above 0"),
        (["--tier", "tape"], "--tier: no tier 'tape'; there are: host, disk, remote"),
        (["--tier", "host", "--bandwidth-gbps", 5], "--bandwidth-gbps goes not with --tier"),
        (["--prefix-tokens", "100"], "--prefix-tokens: 100 is less than a chunk of 512"),
        (["--prefix-tokens", "1024,-1"], "--prefix-tokens: -1 is not above 0"),
        (["--suffix-tokens", 0], "--suffix-tokens is 0; it must be at least 1"),
        (["--batch", "0"], "--batch: 0 is not above 0"),
        (["--pp", 5], "--pp: h100-qwen3-8b has 36 layers, not cut in 5"),
        (["--boundary", "off", "--pp", "1"], "--boundary goes only with --pp 2 or more"),
        (
            ["--pp", "1,2", "--policy", "cake"],
            "--pp 2: cake is for one stage; "
            "--policy may be recompute, load, fifo, longest, cacheflow",
        ),
        (
            ["--pp", 2, "--policy", "load,fifo", "--engine", "load,v1"],
            "--pp 2: v1 is for one stage; --engine may be staircase, recompute, load",
        ),
        (["--engine", "cake"], "--engine: 'cake' is none of staircase, v1, recompute, load"),
        (
            ["--policy", "load,cake", "--engine", "v1"],
            "--engine goes only with --policy fifo, longest or cacheflow",
        ),
        (
            ["--mixed", "--prefix-tokens", "512,1024,2048", "--batch", "3,2"],
            "--mixed: a batch of 2 has no room for 3 lengths; ask for --batch 3 or more",
        ),
        (["--boundary", "half"], "--boundary: 'half' is none of exact, off, off_serial"),
        (["--speed", 2], "--speed goes only with --trace"),
        (["--host-tokens", 1], "--host-tokens goes only with --trace"),
        (["--trace", "demo", "--batch", 2], "--batch goes not with --trace"),
        (["--trace", "demo", "--speed", 0], "--speed is 0.0; it must be above 0"),
        (["--trace", "demo", "--speed", "nan"], "--speed is nan; it must be above 0"),
        (["--trace", "demo", "--requests", 0], "--requests is 0; it must be at least 1"),
        (["--trace", "nowhere"], "--trace: nowhere: no such file or folder"),
        (["--timeline", "t.json"], "--timeline draws one row, and these are 4: ask for one"),
        (["--plot", "out.docx"], "out.docx: the name of a plot must end in one of"),
        (["--json", "nowhere/out.json"], "nowhere/out.json: not a file in an existing folder"),
        (["--timeline", "nowhere/t.json"], "nowhere/t.json: not a file in an existing folder"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "run_all", lambda *_: pytest.fail("must not start"))
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"cacheflow: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--profile is missing"),
        (["--profile", "b200"], "no profile 'b200'"),
        (["--never-worse", "--profile", "b200"], "no profile 'b200'"),
    ],
)
def test_a_profile_that_is_not_there_lists_those_that_are(words: list[str], message: str):
    result = CliRunner().invoke(app, ["simulate", *words])
    assert result.exit_code == 2
    first, *names = result.stderr.splitlines()
    assert first == f"cacheflow: {message}; there are:"
    assert " ".join(name.strip() for name in names).split(", ") == profile_names()
    assert max(map(len, names)) <= 80
    assert all(name.startswith("  ") for name in names)


def test_files_that_are_wrong_are_one_line(tmp_path: Path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.json").write_text('{"format": 2}')
    result = invoke(profile=str(tmp_path / "bad.json"))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"cacheflow: {tmp_path / 'bad.json'}: ")
    assert len(result.stderr.splitlines()) == 1
    empty = invoke("--trace", tmp_path / "empty.jsonl")
    assert empty.exit_code == 2
    assert "no usable session" in empty.stderr
    assert len(empty.stderr.splitlines()) == 1


def test_no_matplotlib_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cacheflow_sgl.replay.plot.importlib.util.find_spec", lambda _: None)
    result = invoke("--plot", tmp_path / "out.png")
    assert result.exit_code == 2
    assert "pip install 'cacheflow-sgl[plot]'" in result.stderr


def test_a_plot_and_a_timeline_are_written(tmp_path: Path):
    plot, timeline = tmp_path / "out.svg", tmp_path / "out.json"
    words = ("--policy", "cacheflow", "--pp", 2, "--plot", plot, "--timeline", timeline)
    assert invoke(*words).exit_code == 0
    assert "<svg" in plot.read_text()
    events = json.loads(timeline.read_text())
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {"compute 0", "compute 1", "I/O 0.0", "I/O 1.0"}
    busy = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert len(busy) == 4
    assert any(
        "simulated on a modelled profile" in event["args"].get("name", "") for event in events
    )


@pytest.mark.parametrize(
    ("end", "status"), [(SimulationError("a process died"), 2), (KeyboardInterrupt(), 130)]
)
def test_what_was_simulated_before_an_end_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException, status: int
):
    def some(runs: list[Run], progress: object) -> Iterator[tuple[int, Result]]:
        at = next(at for at, run in enumerate(runs) if run.policy is BatchPolicyName.LOAD)
        yield at, runs[at].result()
        raise end

    monkeypatch.setattr(command, "run_all", some)
    out = tmp_path / "out.json"
    result = invoke("--json", out)
    assert result.exit_code == status
    assert len(result.stderr.splitlines()) == 1
    assert [row["policy"] for row in json.loads(out.read_text())["rows"]] == ["load"]
    assert "10 Gbps, 8192 x 1" in result.stdout


def test_rows_are_in_the_order_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = ("--bandwidth-gbps", "40,10", "--policy", "cake,load")
    in_order = rows(*words, tmp_path=tmp_path)

    def backwards(runs: list[Run], progress: object) -> Iterator[tuple[int, Result]]:
        yield from ((at, runs[at].result()) for at in reversed(range(len(runs))))

    monkeypatch.setattr(command, "run_all", backwards)
    assert rows(*words, tmp_path=tmp_path) == in_order
    assert [(row["link"], row["policy"]) for row in in_order] == [
        (link, policy) for link in ("40 Gbps", "10 Gbps") for policy in ("cake", "load")
    ]


def test_help_teaches():
    result = invoke("--help")
    assert result.exit_code == 0
    for line in command.simulate.__doc__.splitlines():
        if line.startswith("        "):
            assert line.strip() in result.output, "examples can be copied"


def test_a_pipeline_is_shown_without_cake_unless_it_is_asked_for(tmp_path: Path):
    found = rows("--prefix-tokens", "1024", "--pp", "2", tmp_path=tmp_path)
    assert [row["policy"] for row in found] == ["recompute", "load", "cacheflow"]
