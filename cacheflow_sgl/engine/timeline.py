"""A trace of restores for ui.perfetto.dev and chrome://tracing: the picture of the paper.

The file is a JSON array of Chrome trace events. Its closing bracket may be missing, so it can be
opened at any moment while the server runs.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from cacheflow_sgl.core.report import Interval, LaneLog, RestoreReport

logger = logging.getLogger(__name__)

_Event = dict[str, Any]

_COMPUTE, _IO = 1, 2  # thread ids; readers treat 0 as the idle thread
_LANES = {_COMPUTE: "compute", _IO: "I/O"}


class Timeline:
    """Writes a compute lane and an I/O lane of one rank, one file a rank.

    Times are microseconds of the clock of the lane logs, not shifted: with the machine's monotonic
    clock the files of its ranks fit each other. A lane does one thing at a time: readers drop
    events of a lane that overlap. One thread at a time may call. A file that can't be written
    costs one warning, and the timeline is off from then on; what was written stays readable.
    """

    def __init__(self, path: Path, *, rank: int) -> None:
        """Start a new file, in place of one that is there."""
        self._path = path
        self._process = rank + 1  # readers treat process 0 as the idle one
        self._file: BinaryIO | None = None
        self._written = 0  # bytes, up to the end of a whole restore
        try:
            self._file = path.open("wb")
        except (OSError, ValueError) as error:
            self._switch_off(error)
        self._append("[\n" + ",\n".join(map(_json, self._names(rank))))

    def add(self, report: RestoreReport, compute: LaneLog, io: LaneLog) -> None:
        """Append the events of a restore that has ended, and flush; none if no lane did work."""
        try:
            text = "".join(",\n" + _json(event) for event in self._restore(report, compute, io))
        except ValueError as error:  # a number that JSON lacks
            self._switch_off(error)
            return
        self._append(text)

    def close(self) -> None:
        """Write the closing bracket; a second call does nothing."""
        self._append("\n]\n")
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            self._switch_off(error)
        self._file = None

    def _names(self, rank: int) -> Iterator[_Event]:
        yield self._event("M", "process_name", args={"name": f"rank {rank}"})
        yield self._event("M", "process_sort_index", args={"sort_index": rank})
        for lane, name in _LANES.items():
            yield self._event("M", "thread_name", tid=lane, args={"name": name})
            yield self._event("M", "thread_sort_index", tid=lane, args={"sort_index": lane})

    def _restore(self, report: RestoreReport, compute: LaneLog, io: LaneLog) -> Iterator[_Event]:
        starts = [interval.start_s for interval, _ in compute.busy + io.busy]
        if not starts:
            return
        yield self._mark(f"{report.way}: {report.reason}", min(starts), report.as_dict())
        for lane, log in ((_COMPUTE, compute), (_IO, io)):
            for interval, span in log.busy:
                yield self._work(lane, interval, f"tokens {span.start}-{span.stop}") | {
                    "args": {"rid": report.rid, "tokens": span.tokens}
                }
        for meeting in report.meetings:
            when = _met_s(meeting, compute, io)
            if when is not None:
                yield self._mark(f"met at token {meeting}", when, {"rid": report.rid})

    def _work(self, lane: int, interval: Interval, name: str) -> _Event:
        # Whole microseconds at both ends, so that work that follows other work never overlaps it.
        start, stop = _microseconds(interval.start_s), _microseconds(interval.stop_s)
        return self._event("X", name, tid=lane, cat="restore", ts=start, dur=stop - start)

    def _mark(self, name: str, when_s: float, args: dict[str, Any]) -> _Event:
        when = _microseconds(when_s)
        return self._event("i", name, tid=_COMPUTE, cat="restore", s="p", ts=when, args=args)

    def _event(self, phase: str, name: str, **fields: Any) -> _Event:
        return {"name": name, "ph": phase, "pid": self._process, **fields}

    def _append(self, text: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(text.encode())
            self._file.flush()
            self._written = self._file.tell()
        except OSError as error:
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        logger.warning("no timeline of restores any more in %s: %s", self._path, error)
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(OSError):
            file.close()  # tries once more to write what is left
        with suppress(OSError):
            os.truncate(self._path, self._written)  # no half event at the end


def _met_s(meeting: int, compute: LaneLog, io: LaneLog) -> float | None:
    """Moment at which compute had come up to `meeting` and all loaded above it had landed."""
    above = [span.start for _, span in compute.busy if span.start >= meeting]
    end = min(above, default=None)  # where the next segment was computed, the loads of this end
    ends = [interval.stop_s for interval, span in compute.busy if span.stop <= meeting]
    ends += [
        interval.stop_s
        for interval, span in io.busy
        if span.start >= meeting and (end is None or span.start < end)
    ]
    return max(ends, default=None)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _json(event: _Event) -> str:
    return json.dumps(event, separators=(",", ":"), allow_nan=False)
