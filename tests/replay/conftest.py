from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cacheflow_sgl.replay import Request, Session, Trace
from cacheflow_sgl.replay.prompts import RawPrompt
from tests.replay.sglang_stand import SglangStand


@pytest.fixture
def stand() -> Iterator[SglangStand]:
    with SglangStand() as server:
        yield server


@pytest.fixture
def trace_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a file of a trace: ``trace_file("a.jsonl", "line", "line")``."""

    def write(name: str, *lines: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def text_trace(*sessions: list[str], arrival_s: float | None = None) -> Trace:
    """A trace of literal prompts, a list of them a session."""
    return Trace(
        "test",
        "openai-jsonl",
        tuple(
            Session(
                f"s{n}",
                tuple(Request(f"s{n}", k, RawPrompt(p), arrival_s) for k, p in enumerate(prompts)),
            )
            for n, prompts in enumerate(sessions)
        ),
    )
