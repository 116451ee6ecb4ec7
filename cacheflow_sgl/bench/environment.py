"""What a bench ran on, so that a figure can be reproduced."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

_PACKAGES = ("cacheflow-sgl", "sglang", "torch")


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where, when and how.

    Attributes:
        hardware: the accelerators' names, or the processor's.
        cpus: cores this process may use.
        load_average: processes running or waiting over the last 1, 5 and 15 minutes, at the start.
        model: directory or name.
        versions: of Python and the packages that decide.
        command: the command line.
        date: start, UTC.
    """

    hardware: str
    cpus: int
    load_average: tuple[float, float, float]
    model: str
    versions: dict[str, str]
    command: list[str]
    date: str

    @classmethod
    def now(cls, model: str, *, on_cpu: bool) -> Environment:
        """The environment of a bench that starts now."""
        return cls(
            hardware=_processor() if on_cpu else _accelerators(),
            cpus=len(os.sched_getaffinity(0)),
            load_average=os.getloadavg(),
            model=model,
            versions={"python": platform.python_version()} | _versions(),
            command=[Path(sys.argv[0]).name, *sys.argv[1:]],
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _accelerators() -> str:
    import torch

    count = torch.cuda.device_count()
    return ", ".join(torch.cuda.get_device_name(index) for index in range(count))
