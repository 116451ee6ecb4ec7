"""A patched SGLang knows cacheflow with every plugin off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

SERVE = ["-c", "from sglang.cli.main import main; main()", "serve"]
LAUNCH = ["-m", "sglang.launch_server"]


def python(sglang: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a Python that imports SGLang from `sglang` and loads no plugin."""
    environment = {**os.environ, "PYTHONPATH": str(sglang), "SGLANG_PLUGINS": "none"}
    return subprocess.run(
        [sys.executable, *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", [SERVE, LAUNCH], ids=["sglang serve", "launch_server"])
def test_an_unknown_backend_is_answered_with_choices_that_hold_cacheflow(
    patched_sglang: Path, command: list[str]
) -> None:
    wrong = [*command, "--model-path", "none", "--hicache-storage-backend", "bogus"]
    result = python(patched_sglang, *wrong)
    assert result.returncode == 2
    line = result.stderr.splitlines()[-1]
    assert "invalid choice: 'bogus'" in line
    assert "'cacheflow'" in line


def test_serve_help_lists_it(patched_sglang: Path) -> None:
    result = python(patched_sglang, *SERVE, "--help")
    assert result.returncode == 0
    _, _, text = result.stdout.partition("  --hicache-storage-backend {")
    choices, _, help_text = text.partition("}")
    assert "cacheflow" in choices.split(",")
    assert "cacheflow" in help_text.split("--hicache-storage-prefetch-policy")[0]


SEAMS = """
from sglang.srt.arg_groups import hicache_hook
from sglang.srt.mem_cache.storage import StorageBackendFactory, backend_factory
entry = StorageBackendFactory._registry["cacheflow"]
print(backend_factory.__file__, entry["module_path"], entry["class_name"])

class Backend:
    def __init__(self, *args):
        self.args = args

made = StorageBackendFactory._create_builtin_backend("cacheflow", Backend, "config", "pool")
print(made.args)

class ServerArgs:
    _resolved_overrides = ()
    hicache_storage_backend = "cacheflow"

import sys, types
asked = []
sys.modules["cacheflow_sgl.engine.launch_checks"] = types.SimpleNamespace(
    validate_server_args=lambda cfg: asked.append(cfg.hicache_storage_backend)
)
hicache_hook.validate_cacheflow_options(ServerArgs())
print(asked)
ServerArgs.hicache_storage_backend = "file"
hicache_hook.validate_cacheflow_options(ServerArgs())
print(asked)
sys.modules["cacheflow_sgl.engine.launch_checks"] = None
ServerArgs.hicache_storage_backend = "cacheflow"
hicache_hook.validate_cacheflow_options(ServerArgs())
"""


def test_the_factory_and_the_launch_know_it(patched_sglang: Path) -> None:
    result = python(patched_sglang, "-c", SEAMS)
    factory, made, asked, not_asked = result.stdout.splitlines()
    assert factory == (
        f"{patched_sglang}/sglang/srt/mem_cache/storage/backend_factory.py "
        "cacheflow_sgl.engine.storage CacheFlowStorage"
    )
    assert made == "('config', 'pool')"
    assert asked == not_asked == "['cacheflow']"
    # Without the package, the launch ends with one line.
    error = result.stderr.splitlines()[-1]
    assert error.startswith(
        "ValueError: --hicache-storage-backend cacheflow needs the cacheflow-sgl"
    )
