"""What a bench ran on, so that a figure can be reproduced."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import msgspec

from cacheflow_sgl import machine

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
            hardware=machine.processor() if on_cpu else _accelerators(),
            cpus=len(os.sched_getaffinity(0)),
            load_average=os.getloadavg(),
            model=model,
            versions=machine.versions(_PACKAGES),
            command=machine.command_line(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def _accelerators() -> str:
    import torch

    count = torch.cuda.device_count()
    return ", ".join(torch.cuda.get_device_name(index) for index in range(count))
