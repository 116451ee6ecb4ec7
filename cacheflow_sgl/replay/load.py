"""From files to a trace: what can be read is read, what cannot is named by file and line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from cacheflow_sgl.replay.errors import FormatError, ReplayError
from cacheflow_sgl.replay.formats import READERS, detect, join_turns
from cacheflow_sgl.replay.trace import Broken, Request, Session, Trace

TraceFormat = Literal[
    "auto",
    "mooncake",
    "swe-agent",
    "mini-swe-agent",
    "sharegpt",
    "wildchat",
    "lmsys",
    "openai-jsonl",
]
FORMATS: tuple[str, ...] = get_args(TraceFormat)
DEMO = "demo"  # the name of the bundled trace
_NAMES_SHOWN = 5  # of the files that a note lists
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".traj")


@dataclass(frozen=True, slots=True)
class _Document:
    line: int
    value: Any


def load_trace(path: str | Path, trace_format: str = "auto") -> Trace:
    """Load a trace file, a folder of them, or the bundled ``demo``.

    Broken parts are skipped and listed in `Trace.broken`; `Trace.note` tells what the files of a
    folder were read as, where they are of several formats or some are no traces. Arrival times are
    shifted so that the first request arrives at 0. Raises ReplayError where nothing is usable.
    """
    if trace_format not in FORMATS:
        raise ReplayError(f"unknown format {trace_format!r}; formats: {', '.join(FORMATS)}")
    if str(path) == DEMO:
        bundled = resources.files("cacheflow_sgl.replay") / "data" / "agent_demo.jsonl"
        with resources.as_file(bundled) as file:
            return replace(_load(file, trace_format), name=DEMO)
    return _load(Path(path), trace_format)


def _load(path: Path, trace_format: str) -> Trace:
    sessions: list[Session] = []
    broken: list[Broken] = []
    read: dict[str, list[str]] = {}  # format -> names of the files
    skipped: list[str] = []
    for file in _files(path):
        label = str(file.relative_to(path)) if path.is_dir() else file.name
        used = None
        if file.suffix in _SUFFIXES or not path.is_dir():
            used = _load_file(file, label, trace_format, sessions, broken)
        (skipped if used is None else read.setdefault(used, [])).append(label)
    if not sessions:
        why = f"; first: {broken[0]}" if broken else ""
        raise ReplayError(f"{path}: no usable session ({len(broken)} broken lines{why})")
    ordered = _from_zero(sessions)
    return Trace(path.name, "+".join(read), ordered, tuple(broken), _note(read, skipped))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ReplayError(f"{path}: no such file or folder (the bundled trace is named {DEMO!r})")
    files = sorted(f for f in path.rglob("*") if f.is_file())
    if not any(f.suffix in _SUFFIXES for f in files):
        raise ReplayError(f"{path}: no trace in this folder ({', '.join(_SUFFIXES)})")
    return files


def _note(read: dict[str, list[str]], skipped: list[str]) -> str:
    if len(read) == 1 and not skipped:
        return ""
    parts = [f"read as {used}: {_shortened(names)}" for used, names in read.items()]
    parts += [f"skipped: {_shortened(skipped)}"] if skipped else []
    return "; ".join(parts)


def _shortened(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _load_file(
    file: Path,
    label: str,
    trace_format: str,
    sessions: list[Session],
    broken: list[Broken],
) -> str | None:
    """Append what one file holds; returns the format it was read as, None if it is no trace."""
    found: list[Session] = []
    used = None if trace_format == "auto" else trace_format
    for item in _documents(file, label):
        if isinstance(item, Broken):
            broken.append(item)
            continue
        used = used or detect(item.value, file.name)
        if used is None:
            broken.append(Broken(label, item.line, "not a trace in any known format"))
            continue
        try:
            found += READERS[used](item.value, f"{label}:{item.line}")
        except FormatError as error:
            likely = detect(item.value, file.name)
            hint = f"; it looks like {likely}" if likely not in (None, used) else ""
            broken.append(Broken(label, item.line, f"{used}: {error}{hint}"))
    if used == "openai-jsonl":
        found = join_turns(found)
    sessions += found
    return used if found else None


def _documents(file: Path, label: str) -> Iterator[_Document | Broken]:
    """The documents of a file: a whole JSON file, the elements of an array, or lines."""
    try:
        data = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ReplayError(f"{file}: {error.strerror}") from None
    decoder = msgspec.json.Decoder()
    try:
        whole = decoder.decode(data)
    except ValueError as error:
        if data.lstrip()[:1] == b"[" or file.suffix in (".traj", ".json"):
            # One document by its look or its name; a JSONL file may carry these names too.
            lines = list(_lines(data, label, decoder))
            if not any(isinstance(x, _Document) and isinstance(x.value, dict) for x in lines):
                yield Broken(label, 1, f"not JSON: {error}")
                return
            yield from lines
        else:
            yield from _lines(data, label, decoder)
        return
    if isinstance(whole, list) and not _is_conversation(whole):
        for index, value in enumerate(whole):
            yield _Document(index + 1, value)
    else:
        yield _Document(1, whole)


def _lines(
    data: bytes, label: str, decoder: msgspec.json.Decoder[Any]
) -> Iterator[_Document | Broken]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                yield _Document(number, decoder.decode(line))
            except ValueError as error:
                yield Broken(label, number, f"not JSON: {error}")


def _is_conversation(values: list[Any]) -> bool:
    """A bare list of messages is one document, any other list is a list of documents."""
    return bool(values) and isinstance(values[0], dict) and bool({"role", "from"} & set(values[0]))


def _from_zero(sessions: list[Session]) -> tuple[Session, ...]:
    """Arrival times counted from the first arrival of the trace."""
    arrivals = [r.arrival_s for s in sessions for r in s.requests if r.arrival_s is not None]
    if not arrivals:
        return tuple(sessions)
    start = min(arrivals)

    def shifted(request: Request) -> Request:
        if request.arrival_s is None:
            return request
        return replace(request, arrival_s=request.arrival_s - start)

    return tuple(Session(s.name, tuple(shifted(r) for r in s.requests)) for s in sessions)
