"""`cacheflow bench`: variants measured side by side in one server.

A server that the bench starts finds the variable `CONTROL_VARIABLE` in its environment; the plugin
then asks for `register_hooks`, which lets the bench throttle loads, evict the device and time
forwards there. Any other server is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

CONTROL_VARIABLE = "CACHEFLOW_BENCH_CONTROL"
"""Path of the file by which a bench steers its server; see `protocol`."""


def is_active(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a bench has started this process."""
    return CONTROL_VARIABLE in environ


def register_hooks() -> None:
    """Register the bench's hooks in this process of SGLang."""
    from cacheflow_sgl.bench.server_side import register

    register(Path(os.environ[CONTROL_VARIABLE]))
