"""Plugin of a patched test server that runs without ours: what SGLang lacks on a CPU, and the link.

No seam of ours is hooked: what the server does with cacheflow, its patched source does.
"""

from __future__ import annotations

from cacheflow_sgl import bench, cpu


def register() -> None:
    """SGLang calls this in each of its processes."""
    if cpu.is_active():
        cpu.register_hooks()
    bench.register_hooks()
