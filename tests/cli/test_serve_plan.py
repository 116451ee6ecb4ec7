"""What `cacheflow serve` adds to the user's flags and environment, and what it leaves alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheflow_sgl import cpu
from cacheflow_sgl.cli.main import app
from cacheflow_sgl.cli.serve import Hardware, NoModelError, ServePlan, plan

GPU = Hardware(accelerator="cuda", cores=tuple(range(8)))
CPU = Hardware(accelerator=None, cores=(0, 1, 2, 3))
BIND = "SGLANG_CPU_OMP_THREADS_BIND"


def added(planned: ServePlan, args: list[str]) -> list[str]:
    """The flags behind the user's own, which must be there unchanged."""
    command = planned.argv.index("serve") + 1
    assert planned.argv[command : command + len(args)] == args
    return planned.argv[command + len(args) :]


@pytest.mark.parametrize(
    ("args", "environ", "hardware"),
    [
        (["m", "--tp-size", "2"], {"A": "1"}, GPU),
        (["m", "--device", "cuda"], {}, CPU),
        (["m", "--device=xpu"], {}, CPU),
        (["m"], {"SGLANG_PLATFORM": "mine"}, CPU),
    ],
)
def test_on_an_accelerator_nothing_is_added(args, environ, hardware):
    planned = plan(args, environ, hardware)
    assert (added(planned, args), planned.environ, planned.notes) == ([], environ, [])
    assert planned.argv[0] == sys.executable


@pytest.mark.parametrize(
    ("args", "hardware"),
    [(["m"], CPU), (["m", "--device", "cpu"], CPU), (["m", "--device=cpu"], GPU)],
)
def test_on_a_cpu_the_environment_is_prepared(args, hardware):
    planned = plan(args, {"PYTHONPATH": f"/mine{os.pathsep}/too", "A": "1"}, hardware)
    standin, *users = planned.environ["PYTHONPATH"].split(os.pathsep)
    assert (Path(standin) / "sgl_kernel" / "__init__.py").is_file()
    assert users == ["/mine", "/too"]
    assert planned.environ["A"] == "1"
    assert planned.environ["SGLANG_USE_CPU_ENGINE"] == "1"
    assert cpu.is_active(planned.environ)
    assert "running on the CPU" in planned.notes[0]
    assert BIND not in planned.environ


def test_a_gpu_is_hidden_from_a_server_on_the_cpu():
    environ = {"CUDA_VISIBLE_DEVICES": "3"}
    planned = plan(["m", "--device", "cpu"], environ, GPU)
    assert planned.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert "hid the GPUs" in planned.notes
    assert plan(["m"], environ, CPU).environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_environment_is_prepared_once():
    once = plan(["m"], {}, CPU).environ
    assert plan(["m"], once, CPU).environ == once


def test_missing_flags_are_added_and_told():
    planned = plan(["m"], {}, CPU)
    assert added(planned, ["m"]) == ["--device", "cpu", "--max-total-tokens", "65536"]
    assert planned.notes[1] == "added --device cpu --max-total-tokens 65536"


def test_the_users_flags_win():
    args = ["m", "--device", "cpu", "--max-total-tokens=9"]
    assert added(plan(args, {}, CPU), args) == []
    args = ["m", "--device", "cpu", "--mem-fraction-static", "0.1"]
    assert added(plan(args, {}, CPU), args) == []


def test_flags_in_a_config_file_count_as_given(tmp_path: Path):
    config = tmp_path / "serve.yaml"
    config.write_text("model-path: m\ndevice: cpu\nmax_total_tokens: 9\ntp-size: 4\n")
    args = ["--config", str(config)]
    planned = plan(args, {}, CPU)
    assert added(planned, args) == ["--model-path", "m"]
    assert planned.environ[BIND] == "0|1|2|3"


@pytest.mark.parametrize("key", ["model-path", "model_path", "model"])
def test_a_model_that_only_the_config_file_names_is_passed_on(tmp_path: Path, key: str):
    config = tmp_path / "serve.yaml"
    config.write_text(f"{key}: a/model\ntp-size: 2\n")
    args = ["--config", str(config), "--port", "1"]
    planned = plan(args, {}, GPU)
    assert added(planned, args) == ["--model-path", "a/model"]
    assert planned.notes == [f"added --model-path a/model, from {config}"]
    for model in (["m"], ["--model-path", "m"], ["--model=m"]):
        args = [*model, "--config", str(config)]
        assert added(plan(args, {}, GPU), args) == []


@pytest.mark.parametrize("hardware", [GPU, CPU])
@pytest.mark.parametrize(
    "args",
    [[], ["--tp-size", "2"], ["--tp-size", "two"], ["--model-path"], ["--model-type", "llm"]],
)
def test_without_a_model_there_is_no_plan(args, hardware):
    with pytest.raises(NoModelError, match=r"no model given.*; name it first"):
        plan(args, {}, hardware)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tp-size: 2\nmodel-path:\n", "given;"),
        ("- a\n", "yaml: not a mapping"),
        ("a: [", "yaml: while parsing"),
        (None, "yaml: No such file"),
    ],
)
def test_a_config_file_without_a_model_says_why(tmp_path: Path, text: str | None, why: str):
    config = tmp_path / "serve.yaml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(NoModelError, match=why) as error:
        plan(["--config", str(config)], {}, GPU)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("args", [["--version"], ["--model-type", "theirs"], ["--", "--help"]])
def test_calls_that_need_no_model_reach_sglang(args):
    assert added(plan(args, {}, GPU), args) == []


def test_serve_without_a_model_is_one_line_and_exit_code_2():
    result = CliRunner().invoke(app, ["serve", "--tp-size", "2"])
    assert result.exit_code == 2
    assert result.stderr.startswith("cacheflow serve: no model given; ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "text", ""])
def test_a_config_file_without_flags_is_left_to_sglang(tmp_path: Path, text: str):
    config = tmp_path / "serve.yaml"
    config.write_text(text)
    args = ["m", "--config", str(config)]
    assert "--device" in added(plan(args, {}, CPU), args)


@pytest.mark.parametrize(
    ("declared", "flags", "expected"),
    [
        ({"torch_dtype": "float32"}, [], True),
        ({"dtype": "float32"}, [], True),
        ({"torch_dtype": "bfloat16"}, [], False),
        ({}, [], False),
        ({"torch_dtype": "float32"}, ["--dtype", "bfloat16"], False),
    ],
)
def test_a_float32_checkpoint_stays_float32(tmp_path: Path, declared, flags, expected):
    (tmp_path / "config.json").write_text(json.dumps(declared))
    for model in ([str(tmp_path)], ["--model-path", str(tmp_path)], [f"--model={tmp_path}"]):
        args = [*model, *flags]
        assert ("float32" in added(plan(args, {}, CPU), args)) is expected


@pytest.mark.parametrize(
    ("flags", "cores", "expected"),
    [
        (["--tp", "2"], (0, 1), "0|1"),
        (["--tensor-parallel-size=2"], (0, 1, 2, 3, 4), "0,1|2,3"),
        (["--tp-size", "2", "--pp-size", "2"], (0, 1), "0|1|0|1"),
        (["--dp", "3"], (4, 6, 8), "4|6|8"),
        (["--tp-size", "2"], (5,), "5|5"),
    ],
)
def test_ranks_share_the_cores(flags, cores, expected):
    planned = plan(["m", *flags], {}, Hardware(None, cores))
    assert planned.environ[BIND] == expected
    assert planned.notes[-1] == f"set {BIND}={expected}"


def test_a_core_set_of_the_users_stays():
    planned = plan(["m", "--tp", "2"], {BIND: "3|2"}, CPU)
    assert planned.environ[BIND] == "3|2"


@pytest.mark.parametrize("args", [["m", "--tp", "two"], ["m", "--device"]])
def test_a_bad_command_line_reaches_sglang_as_it_is(args):
    assert added(plan(args, {}, CPU), args)


@pytest.mark.parametrize(("command", "model"), [("serve", "Qwen/Qwen3-8B"), ("tiny-model", "tiny")])
def test_the_example_in_the_help_can_be_pasted(command: str, model: str):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    last = 'flags[@]}"'
    example = shown[shown.index("flags=(") : shown.index(last) + len(last)]
    # Pasted as it is on the terminal: also with the spaces that fill its lines.
    script = f"cacheflow() {{ printf '%s\\n' \"$@\"; }}\n{example}"
    words = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    assert words.stdout.splitlines() == [
        "serve",
        model,
        *("--page-size", "64", "--enable-hierarchical-cache"),
        *("--hicache-storage-backend", "cacheflow"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", '{"directory": "kv"}'),
    ]
