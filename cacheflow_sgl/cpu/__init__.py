"""What SGLang needs to run on a machine without a GPU.

`activate` prepares this process and its children before SGLang is imported; `register_hooks`
is called by the plugin in every SGLang process and adds the pieces that are missing there.
Where the device is not `cpu`, neither is called and SGLang is left as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

ACTIVE_VARIABLE = "CACHEFLOW_CPU"
_STANDIN_DIRECTORY = Path(__file__).resolve().parent / "standin"


def is_active(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Whether this process, or the one that started it, chose the CPU device."""
    return environ.get(ACTIVE_VARIABLE) == "1"


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set in `environ` what a process needs, before its start, to run SGLang on the CPU.

    `SGLANG_USE_CPU_ENGINE` selects SGLang's own CPU platform. `PYTHONPATH` gains, in front of
    the user's entries, the directory of the `sgl_kernel` stand-in: unlike an import hook it
    reaches spawned children, which import `sglang.srt` before plugins load.
    """
    environ[ACTIVE_VARIABLE] = "1"
    environ["SGLANG_USE_CPU_ENGINE"] = "1"
    standin = str(_STANDIN_DIRECTORY)
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if standin not in entries:
        environ["PYTHONPATH"] = os.pathsep.join([standin, *entries])


def activate() -> None:
    """Prepare this process and its children for SGLang on the CPU; safe to call twice.

    Raises:
        RuntimeError: SGLang is already imported here, so it has chosen its platform.
    """
    if not is_active() and "sglang.srt" in sys.modules:
        raise RuntimeError(
            "cacheflow_sgl.cpu.activate() came after SGLang's import, which fixes the device; "
            "call it first"
        )
    prepare(os.environ)
    standin = str(_STANDIN_DIRECTORY)
    if standin not in sys.path:
        sys.path.insert(0, standin)


def register_hooks() -> None:
    """Add to SGLang, in this process, what its CPU device lacks; safe to call twice."""
    from cacheflow_sgl.cpu.hooks import register

    register()
