"""A strict reader and applier of unified diffs, for apply_patches.py (standard library only).

Strict: a hunk fits at its exact lines or not at all, where `patch` would look around and guess.
The caller knows the file by its sha256, so there is nothing to guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HUNK_HEADER = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(ValueError):
    """The text is not a unified diff that this module takes; one line says where and why."""


@dataclass(frozen=True)
class Hunk:
    """One hunk: the lines at `old_start` become `new`, and the reverse at `new_start`.

    Starts count lines from 0; lines carry no newline.
    """

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class Diff:
    """A diff of one or more existing files; `title` is the first line of its text."""

    title: str
    hunks: dict[str, tuple[Hunk, ...]]  # by path, without the a/ and b/ of the diff


def parse(text: bytes) -> Diff:
    """Read a diff with a/ and b/ in front of its paths and any text in front of its files.

    Raises DiffError for anything else, also for new and deleted files and for files without a
    newline at their end.
    """
    lines = [*text.split(b"\n"), b""]
    hunks: dict[str, list[Hunk]] = {}
    current: list[Hunk] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(b"--- ") and lines[at + 1].startswith(b"+++ "):
            current = hunks.setdefault(_path(line, lines[at + 1], at), [])
            at += 2
        elif hunks and (header := HUNK_HEADER.match(line)):
            hunk, at = _parse_hunk(lines, at + 1, header)
            current.append(hunk)
        elif line.startswith(b"\\"):
            raise DiffError(f"line {at + 1}: a file without a newline at its end")
        else:
            at += 1
    if not all([hunks, *hunks.values()]):
        raise DiffError("no hunk in it")
    return Diff(lines[0].decode(), {path: tuple(found) for path, found in hunks.items()})


def _path(old: bytes, new: bytes, at: int) -> str:
    old_name, new_name = (line[4:].split(b"\t")[0] for line in (old, new))
    if old_name[:2] != b"a/" or new_name[:2] != b"b/" or old_name[2:] != new_name[2:]:
        raise DiffError(f"line {at + 1}: not a change of one file a/PATH to b/PATH")
    return new_name[2:].decode()


def _parse_hunk(lines: list[bytes], at: int, header: re.Match[bytes]) -> tuple[Hunk, int]:
    old_line, old_count, new_line, new_count = (
        1 if group is None else int(group) for group in header.groups()
    )
    old: list[bytes] = []
    new: list[bytes] = []
    while len(old) < old_count or len(new) < new_count:
        mark, text = lines[at][:1], lines[at][1:]
        if mark not in (b" ", b"-", b"+"):
            raise DiffError(f"line {at + 1}: not a line of a hunk")
        if mark != b"+":
            old.append(text)
        if mark != b"-":
            new.append(text)
        at += 1
    # A side without lines names the line it follows; any other names its first line.
    hunk = Hunk(
        old_start=old_line - (old_count > 0),
        new_start=new_line - (new_count > 0),
        old=tuple(old),
        new=tuple(new),
    )
    return hunk, at


def apply(data: bytes, hunks: tuple[Hunk, ...], *, reverse: bool = False) -> bytes | None:
    """Apply the hunks of one file, or undo them; None where the lines there are other ones."""
    lines = data.split(b"\n")
    for hunk in reversed(hunks):  # from the end: the lines in front are still numbered as they were
        old, new = (hunk.new, hunk.old) if reverse else (hunk.old, hunk.new)
        start = hunk.new_start if reverse else hunk.old_start
        if tuple(lines[start : start + len(old)]) != old:
            return None
        lines[start : start + len(old)] = new
    return b"\n".join(lines)
