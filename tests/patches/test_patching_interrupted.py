"""scripts/apply_patches.py killed, or failing, before each of its writes.

An audit hook sees every creation, change of mode, rename and removal of a file below the root
before it happens, whatever the script's own structure, and strikes at the n-th. The patches are two
small ones, since the time that this takes grows with the square of the files.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from .conftest import PATCHES, REPOSITORY, TARGETS, Snapshot, copy_subset, run_script, snapshot

STRIKE = """
import os, runpy, signal, sys
script, how, at, *args = sys.argv[1:]
writes = 0

def strike(event, arguments):
    global writes
    if event == "open":
        counts = arguments[2] & (os.O_WRONLY | os.O_RDWR)
    else:
        counts = event in ("os.rename", "os.remove", "os.chmod", "os.chown")
    if not counts or (event == "open" and root not in str(arguments[0])):
        return
    writes += 1
    if how == "kill" and writes == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
    if (how == "fail" and writes == int(at)) or (how == "fail on" and writes >= int(at)):
        raise OSError(28, "No space left on device", str(arguments[0]))

root = args[args.index("--root") + 1]
sys.path.insert(0, os.path.dirname(script))
sys.argv = [script, *args]
sys.addaudithook(strike)
runpy.run_path(script, run_name="__main__")
"""
FILES = TARGETS[:3]


def add_first_line(line: str, before: dict[str, str]) -> str:
    """A patch that puts `line` above the present first line of each file."""
    hunks = [
        f"--- a/{name}\n+++ b/{name}\n@@ -1,1 +1,2 @@\n+{line}\n {first}\n"
        for name, first in before.items()
    ]
    return "Title\n\n" + "".join(hunks)


@dataclass(frozen=True)
class Script:
    """The script with two patches, and the hashes of their files on both sides."""

    path: Path
    before: dict[str, str]
    after: dict[str, str]

    def run(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        return run_script(*args, script=self.path)

    def struck(self, how: str, at: int, *args: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-c", STRIKE, self.path, how, str(at), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    root = tmp_path_factory.mktemp("two-patches")
    pristine = copy_subset(root / "pristine")
    shutil.copytree(REPOSITORY / "scripts", root / "scripts")
    folder = root / "patches" / PATCHES.name
    folder.mkdir(parents=True)
    first = {name: (pristine / name).read_text().split("\n")[0] for name in FILES}
    (folder / "0001-all.patch").write_text(add_first_line("# one", first))
    (folder / "0002-again.patch").write_text(add_first_line("# two", {FILES[0]: "# one"}))
    path = root / "scripts" / "apply_patches.py"
    before = hashes(pristine)
    for args in [["--make"], []]:
        assert run_script(*args, "--root", pristine, script=path).returncode == 0
    return Script(path, before, hashes(pristine))


def hashes(root: Path) -> dict[str, str]:
    return {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in FILES}


def restore(root: Path, files: Snapshot) -> None:
    for name, (_, data) in files.items():
        (root / name).write_bytes(data)
    assert snapshot(root) == files


@pytest.mark.parametrize("mode", [[], ["--revert"]], ids=["apply", "revert"])
@pytest.mark.parametrize("then", [[], ["--revert"]], ids=["then-apply", "then-revert"])
def test_killed_before_any_write_the_next_run_ends_the_work(
    tree: Path, script: Script, mode: list[str], then: list[str]
) -> None:
    original = snapshot(tree)
    script.run("--root", tree)
    patched = snapshot(tree)
    partly = 0
    for at in count(1):
        restore(tree, patched if mode else original)
        result = script.struck("kill", at, *mode, "--root", tree)
        if result.returncode == 0:
            break
        assert result.returncode == -9
        now = hashes(tree)
        assert all(now[name] in (script.before[name], script.after[name]) for name in FILES)
        if now not in (script.before, script.after):
            partly += 1
            check = script.run("--check", "--root", tree)
            assert check.returncode == 1
            assert "partly applied" in check.stdout
        assert script.run(*then, "--root", tree).returncode == 0
        assert snapshot(tree) == (original if then else patched)  # and no staged file is left
    assert at > 3 * len(FILES)  # a file is created, given its mode and renamed
    assert partly == len(FILES) - 1


@pytest.mark.parametrize("mode", [[], ["--revert"]], ids=["apply", "revert"])
def test_a_failing_write_is_one_line_and_the_tree_is_as_before(
    tree: Path, script: Script, mode: list[str]
) -> None:
    if mode:
        script.run("--root", tree)
    start = snapshot(tree)
    for at in count(1):
        result = script.struck("fail", at, *mode, "--root", tree)
        if result.returncode == 0:
            break
        assert result.returncode == 2
        assert result.stderr.startswith("apply_patches: cannot write in ")
        assert "(No space left on device): nothing was changed" in result.stderr
        assert result.stderr.count("\n") == 1
        assert snapshot(tree) == start
    assert at > 3 * len(FILES)


def test_when_it_cannot_even_be_put_back_the_line_says_so(tree: Path, script: Script) -> None:
    start = snapshot(tree)
    said = set()
    for at in count(1):
        result = script.struck("fail on", at, "--root", tree)
        if result.returncode == 0:
            break
        assert result.stderr.count("\n") == 1
        partly = hashes(tree) != script.before
        assert ("the tree is partly applied" in result.stderr) == partly
        assert ("nothing was changed" in result.stderr) != partly
        said.add(partly)
        script.run("--revert", "--root", tree)
        assert snapshot(tree) == start
    assert said == {True, False}


def test_runs_at_the_same_time_end_in_one_state(tree: Path, script: Script) -> None:
    start = snapshot(tree)
    for last in ([], ["--revert"]):
        runs = [
            subprocess.Popen(
                [sys.executable, "-S", script.path, *mode, "--root", tree],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for mode in ([], ["--revert"], [], ["--revert"])
        ]
        for process in runs:
            _, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, b"")
        assert hashes(tree) in (script.before, script.after)
        script.run(*last, "--root", tree)
    assert snapshot(tree) == start
