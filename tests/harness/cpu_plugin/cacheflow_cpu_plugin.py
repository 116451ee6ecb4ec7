"""Plugin of a test server that runs without ours: only what SGLang lacks on a CPU.

A folder of its own: servers that load our plugin must get these pieces from it.
"""

from __future__ import annotations

from cacheflow_sgl import cpu


def register() -> None:
    """SGLang calls this in each of its processes."""
    if cpu.is_active():
        cpu.register_hooks()
