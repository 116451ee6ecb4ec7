#!/usr/bin/env python3
"""Apply, check or revert CacheFlow's source patches to an SGLang installation.

The plugin of cacheflow-sgl needs no patch. The patches are for users who pin or fork SGLang, or
who want `sglang serve --help` to list cacheflow: see patches/README.md.

The manifest of a version knows every file by its sha256 before and after each patch. All results
are computed and verified in memory before the first write, and each file changes by one rename,
so that after a kill every file is in a known state and the next run ends the work, forwards or
backwards. Python recompiles a changed file by itself: its size and time change.

Standard library only: runs with any Python 3.11 or later, installed packages or none.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unified_diff

PATCHES = Path(__file__).resolve().parent.parent / "patches"
FOLDER = "sglang-"  # patches/sglang-VERSION/
OK, NOT_APPLIED, REFUSED = 0, 1, 2

DESCRIPTION = """\
Apply CacheFlow's source patches to an SGLang installation (the default), check them, or revert
them byte for byte. The second run of the same changes nothing; a half-patched tree is never left.
"""

EPILOG = """\
examples:
  apply_patches.py                      patch the SGLang that this Python imports
  apply_patches.py --check              is it patched, and intact?
  apply_patches.py --revert             give every file its original bytes back
  apply_patches.py --root /srv/wheel    another one: the folder that holds sglang/

exit status:
  0  done, or nothing to do; with --check: applied and intact
  1  with --check: not applied, or only partly
  2  refused with one line on stderr, nothing changed (unknown version, modified or missing file,
     read-only installation, no sglang found)
"""


class RefusalError(Exception):
    """One line for the user: what, where, the mend. The tree is unchanged unless it says so."""


# ---- The patches of a version ------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one patch does to one file: the sha256 (hex) on both sides and the hunks between."""

    patch: Path
    before: str
    after: str
    hunks: tuple[unified_diff.Hunk, ...]


def sha256(data: bytes) -> str:
    """Return the sha256 of `data` in hex."""
    return hashlib.sha256(data).hexdigest()


def supported_versions() -> list[str]:
    """Return the SGLang versions that patches/ has a folder for."""
    return sorted(folder.name.removeprefix(FOLDER) for folder in PATCHES.glob(f"{FOLDER}*"))


def load_steps(version: str) -> dict[str, list[Step]]:
    """Return, by path below the root, the steps of a version's patches in their order."""
    folder = PATCHES / f"{FOLDER}{version}"
    steps: dict[str, list[Step]] = {}
    for entry in read_manifest(folder / "manifest.json"):
        file = folder / entry["name"]
        hunks = read_diff(file).hunks
        hashes = {changed["path"]: changed for changed in entry["files"]}
        if hashes.keys() != hunks.keys():
            raise damaged(file, "its files are not those of the manifest")
        for path in hunks:
            step = Step(file, hashes[path]["before"], hashes[path]["after"], hunks[path])
            steps.setdefault(path, []).append(step)
    return steps


def read_manifest(file: Path) -> list[dict[str, Any]]:
    """Return the manifest's patches: name, title, files (path, before, after)."""
    try:
        patches: list[dict[str, Any]] = json.loads(file.read_bytes())["patches"]
    except (OSError, ValueError, KeyError) as error:
        raise damaged(file, str(error)) from None
    return patches


def read_diff(file: Path) -> unified_diff.Diff:
    """Read a patch file."""
    try:
        return unified_diff.parse(file.read_bytes())
    except (OSError, unified_diff.DiffError) as error:
        raise damaged(file, str(error)) from None


def damaged(file: Path, why: str) -> RefusalError:
    """Return the refusal for a file of patches/ that is not as we made it."""
    return RefusalError(f"{file} is damaged ({why}): nothing was changed; git checkout restores it")


# ---- The installation --------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A file that patches change, its present bytes and how many of its steps they hold."""

    path: str
    file: Path
    steps: list[Step]
    data: bytes
    applied: int

    def at(self, applied: int) -> bytes:
        """Return the bytes with `applied` steps in them; every step is verified by its sha256."""
        data, level = self.data, self.applied
        while level != applied:
            reverse = level > applied
            step = self.steps[level - 1] if reverse else self.steps[level]
            result = unified_diff.apply(data, step.hunks, reverse=reverse)
            if result is None or sha256(result) != (step.before if reverse else step.after):
                raise damaged(step.patch, f"it does not give the {self.path} of the manifest")
            data, level = result, level + (-1 if reverse else 1)
        return data


@dataclass(frozen=True)
class Tree:
    """An SGLang installation: `root` holds sglang/."""

    root: Path
    version: str
    targets: list[Target]

    def __str__(self) -> str:
        return f"sglang {self.version} in {self.root}"

    def patches(self) -> dict[str, list[tuple[str, bool]]]:
        """Return for each patch its files and whether each one holds it."""
        found: dict[str, list[tuple[str, bool]]] = {}
        for target in self.targets:
            for index, step in enumerate(target.steps):
                found.setdefault(step.patch.name, []).append((target.path, index < target.applied))
        return dict(sorted(found.items()))

    def missing(self) -> list[str]:
        """Return the files that do not hold all their patches."""
        return [target.path for target in self.targets if target.applied < len(target.steps)]

    def state(self) -> str:
        """Return `applied`, `not applied` or `partly applied`."""
        if not self.missing():
            return "applied"
        return "partly applied" if any(t.applied for t in self.targets) else "not applied"


def find_root() -> Path:
    """Return the folder that holds the sglang this Python would import, without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise RefusalError(
            f"no sglang installed for {sys.executable}: "
            "run this with the Python that has it, or name its folder with --root"
        )
    # The folder is resolved, not the file: a linked __init__.py would lead to its package cache.
    return Path(spec.origin).parent.parent.resolve()


def read_version(root: Path) -> str:
    """Return the version of the sglang in `root`; the source's own word before pip's record."""
    if not (root / "sglang" / "__init__.py").is_file():
        raise RefusalError(
            f"no sglang in {root}: --root takes the folder that holds sglang/ "
            "(site-packages, or an unpacked wheel)"
        )
    sources = [(root / "sglang" / "_version.py", r"^(?:__version__ = )?version = '(.+)'$")]
    sources += [(d / "METADATA", r"^Version: (.+)$") for d in root.glob("sglang-*.dist-info")]
    for file, pattern in sources:
        with contextlib.suppress(FileNotFoundError):
            if match := re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE):
                return match[1]
    raise RefusalError(
        f"cannot tell the version of the sglang in {root}: "
        "neither sglang/_version.py nor sglang-*.dist-info/METADATA names one"
    )


def read_tree(root: Path) -> Tree:
    """Read every file that the patches of this version touch; refuse what is not known."""
    version = read_version(root)
    if version not in supported_versions():
        raise RefusalError(
            f"no patches for the sglang {version} in {root} "
            f"(supported: {', '.join(supported_versions())}): nothing was changed"
        )
    targets = []
    foreign = []
    for path, steps in load_steps(version).items():
        file = root / path
        data = _read_source(file, version)
        known = [steps[0].before, *(step.after for step in steps)]
        if sha256(data) in known:
            targets.append(Target(path, file, steps, data, known.index(sha256(data))))
        else:
            foreign.append(path)
    if foreign:
        raise RefusalError(
            f"modified: {', '.join(foreign)} in {root} (neither sglang {version}'s own bytes nor "
            f"ours): nothing was changed; reinstall sglang=={version}, or patch by hand as "
            "patches/README.md says"
        )
    return Tree(root, version, targets)


def _read_source(file: Path, version: str) -> bytes:
    # A rename would put a file in the link's place and leave what it points to as it was.
    if file.is_symlink():
        raise RefusalError(
            f"{file} is a symbolic link to {file.resolve()}: nothing was changed; "
            "install sglang with real files (uv: --link-mode copy)"
        )
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise RefusalError(
            f"missing: {file}: nothing was changed; reinstall sglang=={version}"
        ) from None


# ---- Writing -----------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Let one run at a time write below `root`; the lock dies with its process."""
    directory = os.open(root / "sglang", os.O_RDONLY)
    try:
        # NFS refuses an exclusive lock on what is open for reading: there, two runs at once are
        # not kept apart.
        with contextlib.suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def staged_path(file: Path) -> Path:
    """Return where the new bytes of `file` wait for their rename."""
    return file.with_name(f".{file.name}.cacheflow-new")


def stage(file: Path, data: bytes) -> None:
    """Write `data` beside `file`, on disk, with the mode and owner of `file`."""
    status = file.stat()
    descriptor = os.open(staged_path(file), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(data)
        with contextlib.suppress(PermissionError):  # only root may give a file away
            os.fchown(descriptor, status.st_uid, status.st_gid)
        os.fchmod(descriptor, status.st_mode & 0o7777)
        out.flush()
        os.fsync(descriptor)


def drop_staged(tree: Tree) -> None:
    """Remove what a killed or failed run has staged."""
    for target in tree.targets:
        if staged_path(target.file).exists():  # unlink fails on a read-only mount even for nothing
            staged_path(target.file).unlink()


def replace_all(tree: Tree, results: list[tuple[Target, bytes]]) -> None:
    """Give every target its new bytes, or leave all as they were.

    A rename also leaves alone the other names of a file: uv links installed files to its cache.
    Raises RefusalError when a write fails; what was renamed by then is put back.
    """
    done: list[Target] = []
    try:
        drop_staged(tree)
        for target, data in results:
            stage(target.file, data)
        for target, _ in results:
            staged_path(target.file).replace(target.file)
            done.append(target)
    except BaseException as error:
        after = _undo(tree, done)
        if isinstance(error, OSError):
            where = Path(error.filename).parent if error.filename else tree.root
            raise RefusalError(
                f"cannot write in {where} ({error.strerror}): {after}; mend that and run this "
                "again, or patch a copy (--root)"
            ) from None
        raise


def _undo(tree: Tree, done: list[Target]) -> str:
    """Put back the files in `done`, drop what is staged, and say how the tree stands now."""
    try:
        drop_staged(tree)
        for target in done:
            stage(target.file, target.data)
            staged_path(target.file).replace(target.file)
    except OSError:
        if done:
            return "the tree is partly applied, and could not be put back"
    return "nothing was changed"


# ---- Commands ----------------------------------------------------------------------------------


def change(root: Path, *, revert: bool) -> tuple[Tree, list[str]]:
    """Apply all patches, or none of them; return the tree as it is now and the files written."""
    read_version(root)  # a missing sglang is a refusal, not an error of the lock
    with locked(root):
        tree = read_tree(root)
        wanted = [(target, 0 if revert else len(target.steps)) for target in tree.targets]
        results = [(t, t.at(level)) for t, level in wanted if t.applied != level]
        replace_all(tree, results)
        return read_tree(root), [target.path for target, _ in results]


def describe_check(tree: Tree) -> str:
    """Return the line of --check."""
    if tree.state() == "applied":
        return f"{tree}: applied, {len(tree.patches())} patches intact"
    command = f"{sys.argv[0]} --root {tree.root}"
    if tree.state() == "not applied":
        return f"{tree}: not applied; run {command} to apply {len(tree.patches())} patches"
    return (
        f"{tree}: partly applied, without {', '.join(tree.missing())}; "
        f"run {command} to complete it, or with --revert to undo it"
    )


def make(root: Path) -> str:
    """Write the manifest of patches/sglang-VERSION/ from its *.patch files and a pristine tree."""
    version = read_version(root)
    folder = PATCHES / f"{FOLDER}{version}"
    files = sorted(folder.glob("*.patch"))
    if not files:
        raise RefusalError(f"no *.patch in {folder}: write the diffs first (patches/README.md)")
    sources: dict[str, bytes] = {}
    entries = []
    for file in files:
        diff = read_diff(file)
        hashes = []
        for path, hunks in diff.hunks.items():
            before = sources[path] if path in sources else _read_source(root / path, version)
            after = unified_diff.apply(before, hunks)
            if after is None:
                raise RefusalError(
                    f"{file.name} does not fit {root / path} at its exact lines: "
                    "is the tree pristine? then refresh the diff (patches/README.md)"
                )
            sources[path] = after
            hashes.append({"path": path, "before": sha256(before), "after": sha256(after)})
        entries.append({"name": file.name, "title": diff.title, "files": hashes})
    manifest = {"sglang": version, "patches": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return f"{folder / 'manifest.json'}: {len(entries)} patches, {len(sources)} files"


def report_of(tree: Tree) -> dict[str, Any]:
    """Return what --json says of a tree."""
    return {
        "root": str(tree.root),
        "version": tree.version,
        "state": tree.state(),
        "patches": [
            {"name": name, "files": [{"path": path, "applied": held} for path, held in files]}
            for name, files in tree.patches().items()
        ],
    }


def run(args: argparse.Namespace, report: dict[str, Any]) -> int:
    """Do what was asked, print its line, fill in `report`; return the exit status."""
    root = args.root.resolve() if args.root else find_root()
    report["root"] = str(root)
    if args.make:
        print(make(root))
        return OK
    if args.check:
        tree = read_tree(root)
        report.update(report_of(tree))
        print(describe_check(tree))
        return OK if tree.state() == "applied" else NOT_APPLIED
    tree, written = change(root, revert=args.revert)
    report.update(report_of(tree), written=written)
    done = "reverted" if args.revert else "applied"
    print(
        f"{tree}: {done}, {len(written)} files written"
        if written
        else f"{tree}: {tree.state()}, nothing to do"
    )
    return OK


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="only look; exit 0 if applied, else 1")
    mode.add_argument("--revert", action="store_true", help="give the original bytes back")
    mode.add_argument(
        "--make",
        action="store_true",
        help="for developers: rewrite the manifest from the *.patch files and a pristine --root",
    )
    parser.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="the folder that holds sglang/: site-packages, an unpacked wheel "
        "(default: where this Python would import sglang from)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parse_args(argv)
    report: dict[str, Any] = {"supported": supported_versions(), "error": None}
    try:
        report["exit"] = run(args, report)
    except (RefusalError, OSError) as error:
        report.update(error=str(error), exit=REFUSED)
        print(f"apply_patches: {error}", file=sys.stderr)
    if args.json:
        try:
            args.json.write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            print(f"apply_patches: cannot write the report: {error}", file=sys.stderr)
            return REFUSED
    return int(report["exit"])


if __name__ == "__main__":
    sys.exit(main())
