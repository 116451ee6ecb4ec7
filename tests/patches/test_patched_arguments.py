"""A patched SGLang knows cacheflow with every plugin off."""

from __future__ import annotations

import json
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


FACTORY = """
from sglang.srt.mem_cache.storage import StorageBackendFactory, backend_factory
entry = StorageBackendFactory._registry["cacheflow"]
print(backend_factory.__file__, entry["module_path"], entry["class_name"])

class Backend:
    def __init__(self, *args):
        self.args = args

made = StorageBackendFactory._create_builtin_backend("cacheflow", Backend, "config", "pool")
print(made.args)
"""


def test_the_factory_creates_it(patched_sglang: Path) -> None:
    registered, made = python(patched_sglang, "-c", FACTORY).stdout.splitlines()
    assert registered == (
        f"{patched_sglang}/sglang/srt/mem_cache/storage/backend_factory.py "
        "cacheflow_sgl.engine.storage CacheFlowStorage"
    )
    assert made == "('config', 'pool')"


LAUNCH_CHECK = """
import sys
from sglang.srt.arg_groups.hicache_hook import handle_hicache
from sglang.srt.server_args import ServerArgs

def resolve(backend, options):
    record = ServerArgs(
        model_path="none",
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_storage_backend=backend,
        hicache_storage_backend_extra_config=options,
    )
    try:
        handle_hicache(record)
        print("accepted")
    except ValueError as error:
        print(error)

resolve("cacheflow", sys.argv[1])
resolve("cacheflow", '{"directroy": "x"}')
resolve("file", '{"directroy": "x"}')
sys.modules["cacheflow_sgl.engine.launch_checks"] = None  # as without the package
resolve("cacheflow", sys.argv[1])
"""


def test_the_launching_process_checks_the_options(patched_sglang: Path, tmp_path: Path) -> None:
    options = json.dumps({"directory": str(tmp_path / "pages")})
    result = python(patched_sglang, "-c", LAUNCH_CHECK, options)
    good, bad, other_backend, no_package = result.stdout.splitlines()
    assert good == other_backend == "accepted"
    assert "unknown key 'directroy'; did you mean 'directory'?" in bad
    assert no_package.startswith("--hicache-storage-backend cacheflow needs the cacheflow-sgl pack")


NOTIFIED = """
from types import SimpleNamespace
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import (
    AttachHiCacheStorageReqInput,
    EndWeightUpdateReqInput,
)
from sglang.srt.managers.scheduler_components import weight_updater

class Backend:
    def weights_changed(self, model_path, *, flushed):
        print("changed", model_path, flushed)

def manager(backend):
    made = object.__new__(weight_updater.SchedulerWeightUpdaterManager)
    controller = SimpleNamespace(storage_backend=backend)
    made.scheduler = SimpleNamespace(tree_cache=SimpleNamespace(cache_controller=controller))
    made.metrics_collector = None
    made.weights_replaced = False
    return made

def update(made):
    with made._observe_weight_load("disk"):
        print("update")
        raise OSError("half-way")

def attempt(made):
    try:
        update(made)
    except OSError as error:
        print(error)

attempt(manager(Backend()))
for without in [None, object()]:
    attempt(manager(without))
for scheduler in [None, object(), SimpleNamespace(tree_cache=object())]:
    made = manager(None)
    made.scheduler = scheduler
    attempt(made)

made = manager(Backend())
made._session = None
print(made.end_weight_update(EndWeightUpdateReqInput()).success)
made._session = weight_updater._WeightUpdateSession(selector="target")
made.tp_worker = SimpleNamespace(weight_update_runners=lambda: [])
made.tp_cpu_group = None
weight_updater.torch = SimpleNamespace(distributed=SimpleNamespace(barrier=lambda group: None))
print(made.end_weight_update(EndWeightUpdateReqInput()).success)

for updated in [False, True]:  # before the backend is attached
    made = manager(None)
    if updated:
        attempt(made)
    controller = made.scheduler.tree_cache.cache_controller

    def attach(**options):
        controller.storage_backend = Backend()
        return True, "attached"

    made.scheduler.tree_cache.attach_storage_backend = attach
    scheduler = object.__new__(scheduler_module.Scheduler)
    scheduler.enable_hierarchical_cache = True
    scheduler.is_fully_idle = lambda: True
    scheduler.tree_cache = made.scheduler.tree_cache
    scheduler.weight_updater = made
    scheduler_module.get_serving = lambda: SimpleNamespace(served_model_name="tiny")
    scheduler_module.get_context = lambda: SimpleNamespace(override=lambda *_, **__: None)
    request = AttachHiCacheStorageReqInput(hicache_storage_backend="any")
    print(scheduler.attach_hicache_storage_wrapped(request).message)
"""


def test_the_storage_backend_hears_of_failed_and_earlier_updates_and_of_remote_writes(
    patched_sglang: Path,
) -> None:
    result = python(patched_sglang, "-c", NOTIFIED)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:3] == ["update", "changed None False", "half-way"]
    assert lines[3:13] == ["update", "half-way"] * 5
    assert lines[13:16] == ["False", "changed None False", "True"]
    assert lines[16:] == ["attached", "update", "half-way", "changed None False", "attached"]
