import json

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


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_LIBRARIES", ("numpy", "no-such-library"))
    found = faults(run(app, options(directory=str(tmp_path))))
    assert "no-such-library" in found["libraries"]
    assert "pip install no-such-library" in found["libraries"]
