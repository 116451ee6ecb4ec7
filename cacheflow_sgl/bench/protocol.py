"""How a bench and its server talk: three files, beside HTTP.

- the settings (JSON) are written by the bench; the server reads them again when they change;
- the acknowledgement (JSON, beside it) says which eviction the server has done;
- the log (JSON lines, beside it) has one line a forward and one a load.

Each file has one writer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cacheflow_sgl.core.report import Interval
from cacheflow_sgl.files import write_atomically

_POLL_S = 0.002


class BenchError(Exception):
    """A bench cannot go on; the message is one line."""


class Settings(msgspec.Struct, frozen=True):
    """What the server is to do.

    Attributes:
        bytes_per_s: rate of the link from host to device; None leaves it as fast as it is.
        evict: how many times the device was to be evicted so far.
    """

    bytes_per_s: float | None = None
    evict: int = 0


class Ack(msgspec.Struct, frozen=True):
    """The number of the last eviction that is done."""

    evict: int


class Part(msgspec.Struct, frozen=True):
    """One request's rows of a forward: tokens [start, start + rows) of request `rid`."""

    rid: str
    start: int
    rows: int


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """A forward that extended requests, from `at_s` (seconds of `time.perf_counter`) on."""

    parts: list[Part]
    at_s: float
    seconds: float


class Load(msgspec.Struct, frozen=True, tag="load"):
    """One copy from host to device, from `at_s` (seconds of `time.perf_counter`) on."""

    nbytes: int
    at_s: float
    seconds: float

    @property
    def interval(self) -> Interval:
        """When it ran."""
        return Interval(self.at_s, self.at_s + self.seconds)


@dataclass(frozen=True)
class Log:
    """Lines of the log."""

    forwards: tuple[Forward, ...]
    loads: tuple[Load, ...]

    @classmethod
    def of(cls, records: Iterable[Forward | Load]) -> Log:
        """Sort records by kind."""
        records = list(records)
        return cls(
            tuple(record for record in records if isinstance(record, Forward)),
            tuple(record for record in records if isinstance(record, Load)),
        )


def ack_path(settings: Path) -> Path:
    """Where the server acknowledges."""
    return settings.with_name(f"{settings.name}.ack")


def log_path(settings: Path) -> Path:
    """Where the server logs."""
    return settings.with_name(f"{settings.name}.log")


class Control:
    """The bench's end. Writes the first settings at once, so make it before the server starts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._settings = Settings()
        self._stamp = time.time_ns()
        self._read = 0
        self._write()

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Throttle all loads together to so many bytes per second; None lifts the throttle."""
        self._settings = msgspec.structs.replace(self._settings, bytes_per_s=bytes_per_s)
        self._write()

    def evict_device(self, timeout_s: float = 60) -> None:
        """Drop every prefix from the device, as soon as the server is idle; the host keeps them.

        Raises:
            BenchError: the server has not said in time that it is done.
        """
        wanted = self._settings.evict + 1
        self._settings = msgspec.structs.replace(self._settings, evict=wanted)
        self._write()
        deadline = time.monotonic() + timeout_s
        while self._acknowledged() != wanted:
            if time.monotonic() > deadline:
                raise BenchError(f"the server did not evict its device in {timeout_s:g} s")
            time.sleep(_POLL_S)

    def new_log(self) -> Log:
        """What was logged since the last call; complete after `evict_device`."""
        try:
            with log_path(self.path).open("rb") as log:
                log.seek(self._read)
                data = log.read()
        except FileNotFoundError:
            return Log((), ())
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.splitlines()
        return Log.of(msgspec.json.decode(line, type=Forward | Load) for line in lines)

    def _acknowledged(self) -> int:
        try:
            return msgspec.json.decode(ack_path(self.path).read_bytes(), type=Ack).evict
        except FileNotFoundError:
            return 0

    def _write(self) -> None:
        # The clock of file systems is coarse; a stamp of our own makes every change visible.
        self._stamp += 1
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_bytes(msgspec.json.encode(self._settings))
        os.utime(fresh, ns=(self._stamp, self._stamp))
        fresh.replace(self.path)


class ServerEnd:
    """The server's end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = 0
        self._settings = Settings()

    @property
    def settings(self) -> Settings:
        """The settings as they are now; cheap where they have not changed."""
        stamp = self._path.stat().st_mtime_ns
        if stamp != self._stamp:
            self._settings = msgspec.json.decode(self._path.read_bytes(), type=Settings)
            self._stamp = stamp
        return self._settings

    def acknowledge(self, evict: int) -> None:
        """Say that the eviction of this number is done."""
        write_atomically(ack_path(self._path), msgspec.json.encode(Ack(evict)))

    def log(self, record: Forward | Load) -> None:
        """Add a line; whole lines from any thread."""
        with log_path(self._path).open("ab", buffering=0) as log:
            log.write(msgspec.json.encode(record) + b"\n")
