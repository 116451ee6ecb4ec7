"""What a result file says of the machine and the command that made it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def processor() -> str:
    """Name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python and of these packages, by name."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def command_line() -> list[str]:
    """The command that runs, without the folder it is in."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
