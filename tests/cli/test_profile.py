"""`cacheflow profile`: files that are written, shown and refused; what measurements become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheflow_sgl.bench.environment import Environment
from cacheflow_sgl.bench.profile import (
    Measured,
    ModelShape,
    ProfileOptions,
    decode_steps,
    profile_of,
)
from cacheflow_sgl.bench.protocol import BenchError, Forward, Load, Part
from cacheflow_sgl.cli import profile as command
from cacheflow_sgl.cli.main import app
from cacheflow_sgl.cli.serve import Hardware
from cacheflow_sgl.client import ServerError, StreamEvent
from cacheflow_sgl.core.profiles import Profile, decode, encode, load_profile
from cacheflow_sgl.core.roofline import GPUS, MODELS

PROFILES = Path(__file__).parents[2] / "profiles"


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["profile", *map(str, arguments)], env={"COLUMNS": "100"})


def test_model_writes_one_profile(tmp_path: Path):
    out = tmp_path / "new" / "p.json"
    result = invoke("model", "--gpu", "h100", "--model", "qwen3-8b", "--out", out)
    assert (result.exit_code, result.output) == (0, f"wrote {out}\n")
    written = load_profile(out)
    filed = load_profile(PROFILES / "h100-qwen3-8b.json")
    assert (written.compute, written.command) == (filed.compute, filed.command)


def test_model_writes_all_pairs(tmp_path: Path):
    assert invoke("model", "--all", tmp_path).exit_code == 0
    names = {f"{gpu}-{model}.json" for gpu in GPUS for model in MODELS}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert len(names) == 12
    written = load_profile(tmp_path / "l40s-llama-3.1-8b.json")
    assert (written.hardware, written.model) == ("NVIDIA L40S", "Llama-3.1-8B")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--gpu, --model and --out belong together; or give --all DIR"),
        (["--gpu", "h100", "--out", "p"], "--gpu, --model and --out belong together"),
        (["--gpu", "h1", "--model", "qwen3-8b", "--out", "p"], "--gpu h1 is not known; it can be:"),
        (["--gpu", "h100", "--model", "q", "--out", "p"], "--model q is not known; it can be:"),
        (["--all", "p", "--gpu", "h100"], "--all takes no --gpu, --model or --out"),
        (["--gpu", "h100", "--model", "qwen3-8b", "--out", "/proc/p"], "cannot write /proc/p: "),
    ],
)
def test_model_refuses_in_one_line(arguments: list[str], message: str):
    result = invoke("model", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1


def test_show_says_what_a_chunk_a_tier_and_a_plan_cost(tmp_path: Path):
    out = tmp_path / "p.json"
    result = invoke("show", PROFILES / "h100-qwen3-8b.json", "--json", out)
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    assert ["32768", "104.7", "4888"] in rows
    assert ["disk", "100", "6.00", "40690"] in rows
    thresholds = load_profile(PROFILES / "h100-qwen3-8b.json").layer_thresholds
    for each in thresholds:
        assert [f"{each.bandwidth_gbps:g}", str(each.tokens)] in rows
    assert "modelled" in result.output
    assert decode(out.read_bytes()) == load_profile(PROFILES / "h100-qwen3-8b.json")


def test_show_refuses_a_wrong_file(tmp_path: Path):
    path = tmp_path / "p.json"
    content = json.loads((PROFILES / "h100-qwen3-8b.json").read_text())
    content["compute"]["seconds"][3][1][0] = 0
    path.write_text(json.dumps(content))
    result = invoke("show", path)
    assert result.exit_code == 2
    assert f"{path}: Expected `float` > 0.0 - at `$.compute.seconds[3][1][0]`" in result.output


OPTIONS = ProfileOptions(longest=1000, chunk=256, repeats=2)
SHAPE = ModelShape("tiny", layers=4, hidden=256, dtype="float32", value_bytes=4)
ENVIRONMENT = Environment(
    hardware="a CPU",
    cpus=2,
    load_average=(1.25, 1.0, 1.0),
    model="tiny",
    versions={"sglang": "0.5.23"},
    command=["cacheflow", "profile", "measure"],
    date="2026-01-01",
)


def forward_s(start: int, rows: int) -> float:
    return 0.01 + rows * (1 + start / 1000) / 4000


def measured(*, noise: Sequence[float] = (1.0, 0.5, 1.0)) -> Measured:
    """Every cell as often as there is noise, forwards of two requests, loads, decode steps."""
    cells = [(start, rows) for start in OPTIONS.starts for rows in OPTIONS.rows]
    forwards = [
        Forward([Part("r", start, rows)], 0.0, factor * forward_s(start, rows))
        for start, rows in cells
        for factor in noise
    ]
    shared = Forward([Part("r", 0, 64), Part("s", 0, 64)], 0.0, 99.0)
    loads = [Load(count * 65536, 0.0, 0.001 + count * 65536 / 1e9) for count in (1, 4, 16) * 5]
    steps = [(64 + at, 0.02) for at in range(9)] + [(1000 + at, 0.03) for at in range(9)]
    return Measured([*forwards, *[shared] * 9], loads, 16 * 7 * 15, steps)


def test_options_say_which_cells_are_measured():
    assert (OPTIONS.starts, OPTIONS.rows) == ((0, 256, 512), (64, 128, 256))
    assert OPTIONS.requests == 1 + 2 * (3 * 4 + 2)
    odd = ProfileOptions(longest=384, chunk=384, page=48)
    assert (odd.starts, odd.rows) == ((0, 384), (96, 192, 384))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": 500}, "--chunk is 500"),
        ({"chunk": 32, "page": 16}, "--chunk is 32"),
        ({"longest": 100}, "--longest is 100"),
        ({"repeats": 0}, "--repeats"),
        ({"page": 0}, "--chunk"),
    ],
)
def test_options_that_cannot_be_are_named(changes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        ProfileOptions(**changes)


def test_measurements_become_a_profile():
    profile = profile_of(measured(), SHAPE, OPTIONS, ENVIRONMENT)
    assert decode(encode(profile)) == profile
    for start, by_rows in zip(OPTIONS.starts, profile.compute.seconds, strict=True):
        for rows, by_layers in zip(OPTIONS.rows, by_rows, strict=True):
            assert by_layers == (pytest.approx(forward_s(start, rows)),)
    assert (profile.source, profile.layers, profile.compute.layers) == ("measured", 4, (4,))
    assert profile.kv_bytes_per_token == 4096
    assert profile.boundary_bytes_per_token == 2 * 256 * 4
    assert profile.chunk == 256
    [host] = profile.tiers
    assert host.latency_s == pytest.approx(0.001, rel=0.05)
    assert host.bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert profile.decode.per_context_token_s == pytest.approx(0.01 / 936, rel=1e-4)
    assert profile.decode.base_s == pytest.approx(0.02 - 68 * 0.01 / 936, rel=1e-4)
    assert "2 cores, shared" in profile.method
    assert "load average 1.2 " in profile.method


def test_medians_out_of_order_are_brought_together():
    seen = measured()
    slow = Forward([Part("r", 256, 128)], 0.0, 1.0)
    profile = profile_of(
        Measured([*seen.forwards, *[slow] * 9], seen.loads, seen.loaded_tokens, seen.decode_s),
        SHAPE,
        OPTIONS,
        ENVIRONMENT,
    )
    assert decode(encode(profile)) == profile
    middle = profile.compute.seconds[1]
    least, most = forward_s(256, 128), 1.0
    assert least < middle[1][0] < most
    assert profile.compute.seconds[0][2][0] == pytest.approx(forward_s(0, 256))


def test_steps_that_get_no_slower_have_no_slope():
    seen = measured()
    steps = [(64, 0.03), (1000, 0.02)]
    profile = profile_of(
        Measured(seen.forwards, seen.loads, seen.loaded_tokens, steps), SHAPE, OPTIONS, ENVIRONMENT
    )
    assert (profile.decode.base_s, profile.decode.per_context_token_s) == (0.03, 0.0)


def test_a_cell_that_was_not_seen_is_named():
    seen = measured()
    lacking = [forward for forward in seen.forwards if forward.parts[0].rows != 256]
    with pytest.raises(BenchError, match="no forward of 256 rows at 0: are its chunks of another"):
        profile_of(Measured(lacking, seen.loads, 1, seen.decode_s), SHAPE, OPTIONS, ENVIRONMENT)
    with pytest.raises(BenchError, match="no load was measured"):
        profile_of(Measured(seen.forwards, [], 1, seen.decode_s), SHAPE, OPTIONS, ENVIRONMENT)


def test_steps_are_the_gaps_between_single_tokens():
    times = [(0.5, 0), (1.0, 1), (1.25, 2), (2.0, 4), (2.5, 5)]
    events = [StreamEvent(at_s, {"meta_info": {"completion_tokens": n}}) for at_s, n in times]
    assert decode_steps(100, events) == [(101, 0.25), (104, 0.5)]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[ProfileOptions]:
    """The options of what would have been measured, with `measured()` as its result."""
    asked: list[ProfileOptions] = []

    def measure(options: ProfileOptions, *, on_cpu: bool) -> Profile:
        assert on_cpu
        asked.append(options)
        return profile_of(measured(), SHAPE, OPTIONS, ENVIRONMENT)

    monkeypatch.setattr(command, "measure_profile", measure)
    monkeypatch.setattr(command, "detect_hardware", lambda: Hardware(None, (0, 1)))
    return asked


def test_measure_writes_what_it_found(tmp_path: Path, on_cpu: list[ProfileOptions]):
    out = tmp_path / "p.json"
    result = invoke("measure", "--out", out, "--chunk", 256, "--longest", 1024, "--repeats", 3)
    assert (result.exit_code, result.output) == (0, f"wrote {out}\n")
    assert on_cpu == [ProfileOptions(chunk=256, longest=1024, repeats=3)]
    assert load_profile(out).source == "measured"


def test_measure_names_a_wrong_option(on_cpu: list[ProfileOptions]):
    result = invoke("measure", "--out", "p", "--chunk", 100)
    assert (result.exit_code, on_cpu) == (2, [])
    assert "--chunk is 100; it must be a multiple of --page" in result.output


def test_measure_on_a_gpu_wants_a_model(monkeypatch: pytest.MonkeyPatch, on_cpu):
    monkeypatch.setattr(command, "detect_hardware", lambda: Hardware("cuda", (0,)))
    result = invoke("measure", "--out", "p")
    assert result.exit_code == 2
    assert "--model is missing" in result.output


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BenchError("no load"), 2, "cacheflow: no load"),
        (ServerError("no server"), 2, "cacheflow: no server"),
        (KeyboardInterrupt(), 130, "cacheflow: interrupted; nothing was written"),
    ],
)
def test_measure_that_ends_early_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu, error, code, message
):
    def measure(*_args: object, **_options: object) -> Profile:
        raise error

    monkeypatch.setattr(command, "measure_profile", measure)
    out = tmp_path / "p.json"
    result = invoke("measure", "--out", out)
    assert (result.exit_code, result.output) == (code, f"{message}\n")
    assert not out.exists()


@pytest.mark.engine
@pytest.mark.full
def test_a_real_server_is_measured(tmp_path: Path):
    out = tmp_path / "p.json"
    arguments = ["--chunk", 256, "--longest", 256, "--repeats", 2]
    result = invoke("measure", "--out", out, *arguments)
    assert result.exit_code == 0, result.output
    profile = load_profile(out)
    assert (profile.layers, profile.dtype) == (4, "float32")
    assert (profile.kv_bytes_per_token, profile.boundary_bytes_per_token) == (4096, 2048)
    assert profile.compute.starts == (0, 256)
