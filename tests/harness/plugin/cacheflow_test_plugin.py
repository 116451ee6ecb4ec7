"""Plugin of test servers: spoils the KV that they load, while a file says so; more on request.

A check that compares outputs proves little until it has been seen to fail. The file is named by
an environment variable and looked for at each load, so one server serves both kinds of test.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

SWITCH_VARIABLE = "CACHEFLOW_TEST_SPOIL_LOADS"


def register() -> None:
    """SGLang calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.load_to_device_per_layer",
        _spoil,
        HookType.AFTER,
    )
    if directory := os.environ.get("CACHEFLOW_TEST_RESTORES"):
        import restore_faults

        restore_faults.register(Path(directory))


def _spoil(
    result: None,
    host_pool: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    *_: Any,
    **__: Any,
) -> None:
    if Path(os.environ[SWITCH_VARIABLE]).exists():
        host_pool.device_k_buffers[layer_id][device_indices] = 0
