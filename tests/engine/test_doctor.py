import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cacheflow_sgl.cli import doctor
from cacheflow_sgl.cli.main import app

pytestmark = pytest.mark.engine

run = CliRunner().invoke


def options(**values) -> list[str]:
    return ["doctor", "--extra-config", json.dumps(values)]


def test_a_good_install_has_no_fault(tmp_path):
    report = tmp_path / "doctor.json"
    result = run(app, [*options(directory=str(tmp_path / "kv")), "--json", str(report)])
    assert result.exit_code == 0, result.output
    findings = json.loads(report.read_text())["findings"]
    checks = {finding["check"] for finding in findings}
    assert checks >= {"python", "sglang", "libraries", "device", "plugin", "backend", "directory"}
    assert not [finding for finding in findings if finding["status"] == "fault"]


def faults(result) -> dict[str, str]:
    assert result.exit_code == 1, result.output
    lines = [line.split(maxsplit=2) for line in result.output.splitlines()]
    return {check: detail for status, check, detail in lines if status == "fault"}


@pytest.mark.parametrize(
    ("values", "check", "found"),
    [
        ({"capacity": "lots"}, "options", "'lots' is not a size"),
        ({"dir": "/x"}, "options", "did you mean 'directory'?"),
        ({"directory": "/dev/null"}, "directory", "/dev/null"),
    ],
)
def test_bad_options_are_named(values, check, found):
    assert found in faults(run(app, options(**values)))[check]


def test_another_sglang_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.engine_version, "SUPPORTED", "9.9.9")
    found = faults(run(app, options(directory=str(tmp_path))))
    assert "supported is 9.9.9 -> pip install 'sglang==9.9.9'" in found["sglang"]


def test_a_plugin_that_sglang_is_told_to_skip_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    found = faults(run(app, options(directory=str(tmp_path))))
    assert "SGLANG_PLUGINS=other leaves out cacheflow" in found["plugin"]


@pytest.mark.parametrize("library", ["lmdb", "xxhash", "aiohttp", "torch", "numpy"])
def test_a_missing_library_is_named_and_not_a_traceback(library):
    program = (
        f"import sys; sys.modules[{library!r}] = None;"
        "from cacheflow_sgl.cli.main import main; sys.argv[1:] = ['{}']; main()"
    )

    def cacheflow(command: str) -> subprocess.CompletedProcess:
        arguments = [sys.executable, "-c", program.replace("{}", command)]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=200, check=False)

    report = cacheflow("doctor")
    assert report.returncode == 1
    assert "Traceback" not in report.stderr
    assert f"libraries  {library}: " in report.stdout
    assert f"pip install {library}" in report.stdout


def test_another_command_of_a_broken_install_is_one_line():
    program = (
        "import sys; sys.modules['lmdb'] = None;"
        "from cacheflow_sgl.cli.main import main; sys.argv[1:] = ['store', 'ls']; main()"
    )
    arguments = [sys.executable, "-c", program]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 2
    assert run.stderr.strip().splitlines() == [
        "cacheflow: import of lmdb halted; None in sys.modules; see `cacheflow doctor`"
    ]
