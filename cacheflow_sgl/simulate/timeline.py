"""A simulation as a trace for ui.perfetto.dev and chrome://tracing: who did what when.

One process a pipeline stage; in it a lane for compute and one for each link, as the engine's own
timelines have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from cacheflow_sgl.core.simulator.result import Piece, Result

_Event = dict[str, Any]


def timeline(result: Result, title: str) -> bytes:
    """The events of a recorded simulation, Chrome's JSON array. Times are simulated microseconds.

    Args:
        result: of a simulation that recorded.
        title: put in front of each stage's name.
    """
    lines = map(msgspec.json.encode, _events(result, title))
    return b"[\n" + b",\n".join(lines) + b"\n]\n"


def _events(result: Result, title: str) -> Iterator[_Event]:
    stages: set[int] = set()
    for thread, (name, lane) in enumerate(result.lanes.items(), start=1):
        # "compute 0", "I/O 0.1": the stage is the first number. Readers treat process 0 as idle.
        stage = int(name.rpartition(" ")[2].partition(".")[0])
        place = {"pid": stage + 1, "tid": thread}
        if stage not in stages:
            stages.add(stage)
            yield _name("process", f"{title}, stage {stage}", place)
        yield _name("thread", name, place)
        for piece in lane.pieces:
            yield _work(piece, place)


def _name(what: str, name: str, place: dict[str, int]) -> _Event:
    return {"name": f"{what}_name", "ph": "M", **place, "args": {"name": name}}


def _work(piece: Piece, place: dict[str, int]) -> _Event:
    # Whole microseconds at both ends, so that work that follows other work never overlaps it.
    start, stop = round(piece.start_s * 1e6), round(piece.stop_s * 1e6)
    return {
        "name": f"{piece.what} of {piece.rid}",
        "cat": piece.what,
        "ph": "X",
        **place,
        "ts": start,
        "dur": stop - start,
        "args": {
            "rid": piece.rid,
            "start": piece.span.start,
            "stop": piece.span.stop,
            "layers": piece.layers,
        },
    }
