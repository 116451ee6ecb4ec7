"""scripts/unified_diff.py against difflib and patch(1)."""

from __future__ import annotations

import difflib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import REPOSITORY


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "unified_diff", REPOSITORY / "scripts" / "unified_diff.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["unified_diff"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


unified_diff = load()

# Few distinct lines, so that wrong places look right; among them what a diff could misread.
LINE = st.sampled_from([b"", b"a", b"b", b"-- a", b"++ b", b"@@ -1 +1 @@", b"\\ No", b"\tc\r"])
TEXT = st.lists(LINE, max_size=30).map(lambda lines: b"".join(line + b"\n" for line in lines))


def diff_of(old: bytes, new: bytes, context: int = 3) -> bytes:
    return b"Title\n\n" + b"".join(
        difflib.diff_bytes(
            difflib.unified_diff,
            [line + b"\n" for line in old.split(b"\n")[:-1]],
            [line + b"\n" for line in new.split(b"\n")[:-1]],
            b"a/f",
            b"b/f",
            n=context,
        )
    )


@given(TEXT, TEXT, st.integers(0, 3))
def test_forwards_gives_the_new_text_and_backwards_the_old(
    old: bytes, new: bytes, context: int
) -> None:
    if old == new:
        with pytest.raises(unified_diff.DiffError):
            unified_diff.parse(diff_of(old, new))
        return
    diff = unified_diff.parse(diff_of(old, new, context))
    assert diff.title == "Title"
    assert list(diff.hunks) == ["f"]
    assert unified_diff.apply(old, diff.hunks["f"]) == new
    assert unified_diff.apply(new, diff.hunks["f"], reverse=True) == old


@settings(max_examples=25, deadline=None)
@given(TEXT.filter(bool), TEXT.filter(bool))
def test_patch_agrees(old: bytes, new: bytes) -> None:
    if old == new:
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "f").write_bytes(old)
        command = ["patch", "--binary", "-s", "-p1", "-d", folder]
        subprocess.run(command, input=diff_of(old, new), check=True, timeout=10)
        assert (Path(folder) / "f").read_bytes() == new


@given(TEXT, TEXT, TEXT)
def test_another_text_is_none_or_has_exactly_the_lines_of_the_hunks(
    old: bytes, new: bytes, other: bytes
) -> None:
    if old == new:
        return
    hunks = unified_diff.parse(diff_of(old, new)).hunks["f"]
    lines = other.split(b"\n")
    fits = all(tuple(lines[h.old_start : h.old_start + len(h.old)]) == tuple(h.old) for h in hunks)
    assert (unified_diff.apply(other, hunks) is not None) == fits


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "no hunk"),
        (b"--- a/f\n+++ b/f\n", "no hunk"),
        (b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "line 1: not a change of one file"),
        (b"--- a/f\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n", "line 1: not a change of one file"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-a\n+b\n", "line 6: not a line of a hunk"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-a", "line 5: not a line of a hunk"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n\\ No newline\n+b\n", "line 5: not a line"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n\\ No newline\n", "line 6: a file without"),
    ],
)
def test_what_it_does_not_take_is_named_with_its_line(text: bytes, why: str) -> None:
    with pytest.raises(unified_diff.DiffError, match=why):
        unified_diff.parse(text)
