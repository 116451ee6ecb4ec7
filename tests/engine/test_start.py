"""What ends a start, and how: in the launching process, with one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

BACKEND = ["--enable-hierarchical-cache", "--hicache-storage-backend", "cacheflow"]
OPTIONS = "--hicache-storage-backend-extra-config"


@pytest.fixture(scope="module")
def server_args():
    """SGLang's module of arguments with the plugin loaded, as in a launching process."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt import server_args

    return server_args


def refusal(server_args, capsys, argv: list[str]) -> str:
    """The one line that a command line is refused with."""
    with pytest.raises(SystemExit) as caught:
        server_args.prepare_server_args(["--model-path", "m", *BACKEND, *argv])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_an_unknown_backend_is_answered_with_a_list_that_holds_ours(server_args, capsys):
    with pytest.raises(SystemExit):
        server_args.prepare_server_args(["--model-path", "m", "--hicache-storage-backend", "nope"])
    assert "'cacheflow'" in capsys.readouterr().err.splitlines()[-1]


def test_good_options_pass_and_the_directory_is_made(server_args, tmp_path):
    options = json.dumps({"directory": str(tmp_path / "a" / "kv"), "prefetch_threshold": 64})
    parsed = server_args.prepare_server_args(["--model-path", "m", *BACKEND, OPTIONS, options])
    assert parsed.hicache_storage_backend == "cacheflow"
    assert (tmp_path / "a" / "kv").is_dir()


def test_other_backends_are_none_of_our_business(server_args):
    argv = ["--model-path", "m", "--hicache-storage-backend", "file", OPTIONS, '{"x": 1}']
    assert server_args.prepare_server_args(argv).hicache_storage_backend == "file"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"directroy": "/x"}, "unknown key 'directroy'; did you mean 'directory'?"),
        ({"io_threads": "two"}, "io_threads: expected `int"),
        ({"capacity": "-3GB"}, "capacity: '-3GB' is not a size"),
        ({"directory": "/proc/cacheflow"}, "/proc/cacheflow"),
        ({"directory": "/dev/null"}, "/dev/null"),
        ({"directory": "/dev/null/kv"}, "/dev/null"),
    ],
)
def test_bad_options_end_the_start(server_args, capsys, options, found):
    line = refusal(server_args, capsys, [OPTIONS, json.dumps(options)])
    assert line.startswith("cacheflow: ")
    assert found in line


def test_a_directory_of_another_format_ends_the_start(server_args, capsys, tmp_path):
    (tmp_path / "FORMAT").write_text('{"format": 999}')
    line = refusal(server_args, capsys, [OPTIONS, json.dumps({"directory": str(tmp_path)})])
    assert "999" in line


def test_a_config_file_is_checked_as_well(server_args, capsys, tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("hicache-storage-backend-extra-config: '{\"io_threads\": 0}'\n")
    line = refusal(server_args, capsys, ["--config", str(config)])
    assert "io_threads: expected `int` >= 1" in line


def test_a_good_config_file_passes(server_args, tmp_path):
    config = tmp_path / "server.yaml"
    options = json.dumps({"directory": str(tmp_path / "kv"), "io_threads": 2})
    config.write_text(
        "hicache-storage-backend: cacheflow\nenable-hierarchical-cache: true\n"
        f"hicache-storage-backend-extra-config: '{options}'\n"
    )
    parsed = server_args.prepare_server_args(["--model-path", "m", "--config", str(config)])
    assert parsed.hicache_storage_backend == "cacheflow"
    assert parsed.enable_hierarchical_cache
    assert (tmp_path / "kv").is_dir()


def test_the_one_layout_that_cannot_be_stored_is_replaced_and_said(server_args, caplog):
    from sglang.srt.arg_groups import hicache_hook
    from sglang.srt.arg_groups.overrides import resolving_view

    def resolved(backend: str, layout: str) -> str:
        record = server_args.ServerArgs(
            model_path="m", hicache_storage_backend=backend, hicache_mem_layout=layout
        )
        record._resolved_overrides = []
        hicache_hook.resolve_storage_layout_compatibility(record)
        return resolving_view(record).hicache_mem_layout

    assert resolved("cacheflow", "page_first_kv_split") == "page_first_direct"
    assert "using page_first_direct" in caplog.text
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
        assert resolved("cacheflow", layout) == layout
    assert resolved("file", "page_first_kv_split") == "page_first_kv_split"


def test_an_options_file(server_args, capsys, tmp_path):
    options = tmp_path / "options.toml"
    options.write_text(f'directory = "{tmp_path / "kv"}"\nio_thread = 2\n')
    line = refusal(server_args, capsys, [OPTIONS, f"@{options}"])
    assert "unknown key 'io_thread'; did you mean 'io_threads'?" in line


def test_the_engine_raises_one_line(server_args):
    record = server_args.ServerArgs(
        model_path="m",
        enable_hierarchical_cache=True,
        hicache_storage_backend="cacheflow",
        hicache_storage_backend_extra_config='{"io_threads": 0}',
    )
    with pytest.raises(ValueError, match=r"cacheflow: .*io_threads: expected `int` >= 1") as caught:
        record.resolve_once()
    assert "\n" not in str(caught.value)


@pytest.fixture
def other_version(tmp_path) -> dict[str, str]:
    """An environment in which the installed SGLang says it is 0.5.99."""
    metadata = tmp_path / "sglang-0.5.99.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_another_sglang_is_named_with_the_supported_one(other_version, tmp_path):
    program = "from sglang.cli.main import main; main()"
    command = [sys.executable, "-c", program, "serve", "--model-path", str(tmp_path), *BACKEND]
    run = subprocess.run(
        command, env=other_version, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode != 0
    lines = [line for line in run.stderr.splitlines() if line.startswith("cacheflow: ")]
    assert lines == [
        "cacheflow: sglang 0.5.99 is installed, supported is 0.5.23: pip install 'sglang==0.5.23'"
    ]
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    "entry",
    [
        ["-c", "from sglang.cli.main import main; main()", "serve"],
        ["-m", "sglang.launch_server"],
        ["-c", "from cacheflow_sgl.cli.main import main; main()", "serve"],
    ],
    ids=["sglang serve", "sglang.launch_server", "cacheflow serve"],
)
def test_every_command_knows_the_name(entry, tmp_path):
    Path(tmp_path, "config.json").write_text("{}")
    arguments = ["--model-path", str(tmp_path), "--hicache-storage-backend", "nope"]
    run = subprocess.run(
        [sys.executable, *entry, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 2
    assert "invalid choice: 'nope'" in run.stderr
    assert "'cacheflow'" in run.stderr


def test_loading_the_plugin_does_not_import_prometheus(tmp_path):
    """Imported before SGLang sets its multi-process directory, it would lose SGLang's counts."""
    program = (
        "import sys, cacheflow_sgl.engine.plugin as plugin; plugin.register();"
        "print('prometheus_client' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert run.stdout.splitlines()[-1] == "False", run.stderr
