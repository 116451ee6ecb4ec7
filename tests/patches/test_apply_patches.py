"""scripts/apply_patches.py on a copy of the installed SGLang: what it does and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import (
    MANIFEST,
    PATCHES,
    REPOSITORY,
    SCRIPT,
    TARGETS,
    VERSION,
    copy_subset,
    recorded_hashes,
    run_script,
    site_packages,
    snapshot,
)


def applied_hashes() -> dict[str, str]:
    return {file["path"]: file["after"] for patch in MANIFEST["patches"] for file in patch["files"]}


def hashes(root: Path) -> dict[str, str]:
    return {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in TARGETS}


def test_apply_apply_check_revert_gives_the_start_back(tree: Path) -> None:
    start = snapshot(tree)
    first = run_script("--root", tree)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == f"sglang {VERSION} in {tree}: applied, {len(TARGETS)} files written\n"
    patched = snapshot(tree)
    assert hashes(tree) == applied_hashes()
    assert {name: mode for name, (mode, _) in patched.items()} == {
        name: mode for name, (mode, _) in start.items()
    }

    again = run_script("--root", tree)
    assert again.stdout == f"sglang {VERSION} in {tree}: applied, nothing to do\n"
    assert snapshot(tree) == patched

    check = run_script("--check", "--root", tree)
    assert check.returncode == 0
    patches = len(MANIFEST["patches"])
    assert check.stdout == f"sglang {VERSION} in {tree}: applied, {patches} patches intact\n"

    assert run_script("--revert", "--root", tree).returncode == 0
    assert snapshot(tree) == start
    again = run_script("--revert", "--root", tree)
    assert again.stdout == f"sglang {VERSION} in {tree}: not applied, nothing to do\n"
    assert snapshot(tree) == start


@pytest.mark.full
def test_a_whole_installation_is_the_same_after_apply_apply_check_revert(tmp_path: Path) -> None:
    """As a user does it: all of sglang/, compared by `diff -r`."""
    root, before = tmp_path / "site-packages", tmp_path / "before"
    for name in ["sglang", f"sglang-{VERSION}.dist-info"]:
        shutil.copytree(site_packages() / name, root / name)
    run_script("--revert", "--root", root)
    shutil.copytree(root, before)
    for args in [[], [], ["--check"]]:
        assert run_script(*args, "--root", root).returncode == 0
    differ = subprocess.run(["diff", "-rq", before, root], capture_output=True, check=False)
    assert len(differ.stdout.splitlines()) == len(TARGETS)
    assert run_script("--revert", "--root", root).returncode == 0
    subprocess.run(["diff", "-r", before, root], check=True)


def test_check_changes_nothing_and_tells_applied_from_partly_and_not(tree: Path) -> None:
    start = snapshot(tree)
    check = run_script("--check", "--root", tree)
    assert (check.returncode, check.stderr) == (1, "")
    assert f"--root {tree} to apply" in check.stdout
    assert snapshot(tree) == start

    original = (tree / TARGETS[0]).read_bytes()
    run_script("--root", tree)
    (tree / TARGETS[0]).write_bytes(original)
    check = run_script("--check", "--root", tree)
    assert check.returncode == 1
    assert f"partly applied, without {TARGETS[0]};" in check.stdout
    assert check.stdout.count("\n") == 1

    run_script("--root", tree)
    assert hashes(tree) == applied_hashes()


def test_the_json_report_tells_what_the_line_tells(tree: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run_script("--root", tree, "--json", report)
    told = json.loads(report.read_text())
    assert (told["version"], told["state"], told["exit"]) == (VERSION, "applied", 0)
    assert sorted(told["written"]) == TARGETS
    assert [patch["name"] for patch in told["patches"]] == [p["name"] for p in MANIFEST["patches"]]
    assert all(file["applied"] for patch in told["patches"] for file in patch["files"])

    (tree / TARGETS[0]).write_text("x")
    refused = run_script("--check", "--root", tree, "--json", report)
    told = json.loads(report.read_text())
    assert told["exit"] == 2
    assert refused.stderr == f"apply_patches: {told['error']}\n"


def test_a_hard_link_into_a_package_cache_keeps_the_cache_as_it_was(
    tree: Path, tmp_path: Path
) -> None:
    cached = tmp_path / "cached.py"
    cached.hardlink_to(tree / TARGETS[0])
    before = cached.read_bytes()
    run_script("--root", tree)
    assert cached.read_bytes() == before
    assert (tree / TARGETS[0]).read_bytes() != before


def test_without_root_it_works_on_the_sglang_that_this_python_imports(tree: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    # -S leaves the installed SGLang out; an import of the copied sglang would fail on numpy.
    command = [sys.executable, "-S", SCRIPT]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.startswith(f"sglang {VERSION} in {tree}: applied")
    assert hashes(tree) == applied_hashes()


def test_the_metadata_gives_the_version_where_the_source_does_not(tree: Path) -> None:
    (tree / "sglang" / "_version.py").unlink()
    assert run_script("--root", tree).returncode == 0


# ---- Refusals --------------------------------------------------------------------------------


def other_version(root: Path) -> str:
    version = root / "sglang" / "_version.py"
    version.write_text(version.read_text().replace(VERSION, "0.4.9"))
    return f"no patches for the sglang 0.4.9 in {root} (supported: {VERSION}): nothing was changed"


def other_version_in_the_metadata(root: Path) -> str:
    (root / "sglang" / "_version.py").unlink()
    metadata = root / f"sglang-{VERSION}.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"Version: {VERSION}", "Version: 0.4.9"))
    return f"no patches for the sglang 0.4.9 in {root} (supported: {VERSION}): nothing was changed"


def no_version(root: Path) -> str:
    (root / "sglang" / "_version.py").unlink()
    shutil.rmtree(root / f"sglang-{VERSION}.dist-info")
    return f"cannot tell the version of the sglang in {root}"


def modified_file(root: Path) -> str:
    with (root / TARGETS[2]).open("a") as file:
        file.write("# local change\n")
    return f"modified: {TARGETS[2]} in {root}"


def missing_file(root: Path) -> str:
    (root / TARGETS[1]).unlink()
    return f"missing: {root / TARGETS[1]}"


def linked_file(root: Path) -> str:
    (root / TARGETS[1]).rename(root / "elsewhere.py")
    (root / TARGETS[1]).symlink_to(root / "elsewhere.py")
    return f"{root / TARGETS[1]} is a symbolic link to {root / 'elsewhere.py'}"


def no_sglang(root: Path) -> str:
    (root / "sglang").rename(root / "sglong")
    return f"no sglang in {root}"


@pytest.mark.parametrize("mode", [[], ["--check"], ["--revert"]])
@pytest.mark.parametrize(
    "spoil",
    [
        other_version,
        other_version_in_the_metadata,
        no_version,
        modified_file,
        missing_file,
        linked_file,
        no_sglang,
    ],
)
def test_each_refusal_is_one_line_and_changes_nothing(
    tree: Path, spoil: Callable[[Path], str], mode: list[str]
) -> None:
    if "--revert" in mode:
        run_script("--root", tree)
    said = spoil(tree)
    start = snapshot(tree)
    result = run_script(*mode, "--root", tree)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"apply_patches: {said}")
    assert result.stderr.count("\n") == 1
    assert snapshot(tree) == start


def test_no_sglang_installed_is_one_line(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", AS_USER, SCRIPT, ""],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"apply_patches: no sglang installed for {sys.executable}: ")
    assert result.stderr.count("\n") == 1


# The script as another user ("" for the same one). The first, silent run imports all modules: the
# Python itself may lie where only its owner reads.
AS_USER = """
import contextlib, io, os, sys
script, user, *args = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
import apply_patches
if user:
    with contextlib.redirect_stdout(io.StringIO()):
        apply_patches.main(["--check", "--root", args[args.index("--root") + 1]])
    os.setegid(int(user))
    os.seteuid(int(user))
sys.exit(apply_patches.main(args))
"""


@pytest.fixture
def world_readable() -> Iterator[Path]:
    """A folder that another user can reach; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name).resolve()


@pytest.mark.parametrize("mode", ["--check", "--revert"])
def test_a_read_only_installation_is_one_line_and_changes_nothing(
    world_readable: Path, mode: str
) -> None:
    root = copy_subset(world_readable / "site-packages")
    shutil.copytree(REPOSITORY / "scripts", world_readable / "scripts")
    shutil.copytree(REPOSITORY / "patches", world_readable / "patches")
    if mode == "--revert":
        run_script("--root", root)
    folders = [folder for folder in [root, *root.rglob("*")] if folder.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    start = snapshot(root)
    user = "65534" if os.geteuid() == 0 else ""
    script = world_readable / "scripts" / "apply_patches.py"
    as_user = [sys.executable, "-c", AS_USER, script, user, "--root", root]

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*as_user, *args], capture_output=True, text=True, timeout=60, check=False
        )

    refused = run(*([mode] if mode == "--revert" else []))
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"apply_patches: cannot write in {root}/sglang/srt/")
    assert "(Permission denied): nothing was changed" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert snapshot(root) == start
    # Where nothing is to be written, nothing is refused.
    assert run("--check").returncode == (0 if mode == "--revert" else 1)
    assert run(*([] if mode == "--revert" else ["--revert"])).returncode == 0
    for folder in folders:
        folder.chmod(0o755)


# ---- The patches -----------------------------------------------------------------------------


def test_the_manifest_starts_from_the_files_of_the_wheel() -> None:
    recorded = recorded_hashes()
    first = {}
    for patch in MANIFEST["patches"]:
        for file in patch["files"]:
            first.setdefault(file["path"], file["before"])
    assert first == {path: recorded[path] for path in TARGETS}


def test_make_writes_the_committed_manifest(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    shutil.copytree(PATCHES, tmp_path / "patches" / PATCHES.name)
    manifest = tmp_path / "patches" / PATCHES.name / "manifest.json"
    manifest.unlink()
    script = tmp_path / "scripts" / "apply_patches.py"
    assert run_script("--make", "--root", tree, script=script).returncode == 0
    assert manifest.read_bytes() == (PATCHES / "manifest.json").read_bytes()


def test_a_chain_of_patches_on_one_file_goes_forwards_and_backwards(
    tree: Path, tmp_path: Path
) -> None:
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    shutil.copytree(PATCHES, tmp_path / "patches" / PATCHES.name)
    script = tmp_path / "scripts" / "apply_patches.py"
    start = snapshot(tree)
    name = TARGETS[0]
    run_script("--root", tree)
    between = (tree / name).read_bytes()
    lines = between.decode().splitlines(keepends=True)
    (tmp_path / "patches" / PATCHES.name / "0099-comment.patch").write_text(
        f"Comment\n\n--- a/{name}\n+++ b/{name}\n@@ -1,1 +1,2 @@\n+# first\n {lines[0]}"
    )
    run_script("--revert", "--root", tree)
    assert run_script("--make", "--root", tree, script=script).returncode == 0

    run_script("--root", tree, script=script)
    assert (tree / name).read_bytes() == b"# first\n" + between
    (tree / name).write_bytes(between)  # the state with the first patch only
    check = run_script("--check", "--root", tree, script=script)
    assert (check.returncode, "partly applied" in check.stdout) == (1, True)
    run_script("--root", tree, script=script)
    assert (tree / name).read_bytes() == b"# first\n" + between
    run_script("--revert", "--root", tree, script=script)
    assert snapshot(tree) == start


@pytest.mark.parametrize("what", ["diff", "manifest", "line endings", "no diff"])
def test_a_damaged_patch_is_one_line_and_changes_nothing(
    tree: Path, tmp_path: Path, what: str
) -> None:
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    folder = shutil.copytree(PATCHES, tmp_path / "patches" / PATCHES.name)
    file = folder / MANIFEST["patches"][-1]["name"]
    if what == "diff":
        before, added, after = file.read_bytes().rpartition(b"\n+")
        file.write_bytes(before + added + b"# damaged" + after)
    elif what == "line endings":
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    elif what == "no diff":
        file.unlink()
    else:
        file = folder / "manifest.json"
        file.write_text(file.read_text()[:-20])
    start = snapshot(tree)
    result = run_script("--root", tree, script=tmp_path / "scripts" / "apply_patches.py")
    assert result.returncode == 2
    assert result.stderr.startswith(f"apply_patches: {file} is damaged (")
    assert result.stderr.count("\n") == 1
    assert snapshot(tree) == start


@pytest.mark.parametrize("tool", [["patch", "-s", "-p1"], ["git", "apply", "-p1"]])
def test_the_diffs_apply_by_hand_and_the_script_knows_the_result(
    tree: Path, tool: list[str]
) -> None:
    start = snapshot(tree)
    for patch in MANIFEST["patches"]:
        file = (PATCHES / patch["name"]).open("rb")
        with file:
            subprocess.run(tool, stdin=file, cwd=tree, check=True, timeout=30)
    assert hashes(tree) == applied_hashes()
    assert run_script("--check", "--root", tree).returncode == 0
    run_script("--revert", "--root", tree)
    assert {n: d for n, (_, d) in snapshot(tree).items()} == {n: d for n, (_, d) in start.items()}
