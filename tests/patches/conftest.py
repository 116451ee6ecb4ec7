"""Copies of the installed SGLang for scripts/apply_patches.py to work on."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "apply_patches.py"
VERSION = importlib.metadata.version("sglang")
PATCHES = REPOSITORY / "patches" / f"sglang-{VERSION}"
MANIFEST = json.loads((PATCHES / "manifest.json").read_text())
TARGETS = sorted({file["path"] for patch in MANIFEST["patches"] for file in patch["files"]})

Run = Callable[..., subprocess.CompletedProcess[str]]
Snapshot = dict[str, tuple[int, bytes]]


def run_script(*args: str | Path, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    # -S: no installed package is in reach.
    command = [sys.executable, "-S", script, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def site_packages() -> Path:
    return Path(str(importlib.metadata.distribution("sglang").locate_file("")))


def recorded_hashes() -> dict[str, str]:
    """sha256 in hex of SGLang's files, by pip's own record: what they are unpatched."""
    record = importlib.metadata.distribution("sglang").read_text("RECORD")
    assert record is not None
    hashes = {}
    for path, hashed, _ in csv.reader(record.splitlines()):
        digest = hashed.removeprefix("sha256=")
        hashes[path] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    return hashes


def snapshot(root: Path) -> Snapshot:
    """Mode and bytes of every file below `root`."""
    return {
        str(file.relative_to(root)): (file.stat().st_mode, file.read_bytes())
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


def copy_subset(root: Path) -> Path:
    """Copy the files that matter to the script; the rest of sglang/ does not."""
    info = f"sglang-{VERSION}.dist-info/METADATA"
    for name in [*TARGETS, "sglang/__init__.py", "sglang/_version.py", info]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(site_packages() / name, root / name)
    # The installed SGLang may be a patched one.
    run_script("--revert", "--root", root)
    recorded = recorded_hashes()
    for name in TARGETS:
        assert hashlib.sha256((root / name).read_bytes()).hexdigest() == recorded[name]
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A pristine subset of the installed SGLang, with modes that a careless write would lose."""
    root = copy_subset(tmp_path / "site-packages")
    for number, name in enumerate(TARGETS):
        (root / name).chmod([0o644, 0o600, 0o664, 0o755][number % 4])
    return root


@pytest.fixture(scope="session")
def patched_sglang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole copy of the installed SGLang, patched: a folder for PYTHONPATH."""
    root = tmp_path_factory.mktemp("patched")
    for name in ["sglang", f"sglang-{VERSION}.dist-info"]:
        shutil.copytree(site_packages() / name, root / name)  # keeps times: byte code stays valid
    result = run_script("--root", root)
    assert result.returncode == 0, result.stderr
    return root
