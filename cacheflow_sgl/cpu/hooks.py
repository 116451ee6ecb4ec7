"""Which functions of SGLang the CPU device replaces, and by what.

Everything here is a hook of SGLang's own plugin interface
(`sglang/srt/plugins/hook_registry.py`); SGLang applies them after its plugins have run.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from cacheflow_sgl.cpu import attention, threads, transfer

_HOST_POOL = "sglang.srt.mem_cache.pool_host"
_registered = False


def _without(keyword: str) -> Any:
    """A BEFORE hook that passes `False` for `keyword`."""

    def hook(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, keyword: False}

    return hook


def _wait_for_nothing(stream: torch.cpu.Stream) -> None:
    """CPU streams run each call at once, so there is never anything to wait for."""


def register() -> None:
    """Register the hooks in this process; a second call does nothing."""
    global _registered
    if _registered:
        return
    _registered = True

    # Pinning goes through the CUDA runtime. Unpinned, the host pools still come from SGLang's
    # chosen allocator, and the dummy pages of a failed read are plain memory.
    HookRegistry.register(
        f"{_HOST_POOL}.base.HostKVCache.__init__", _without("pin_memory"), HookType.BEFORE
    )
    # SGLang would open an NCCL communicator for the TP and PP groups; gloo serves them all.
    HookRegistry.register(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
        _without("use_pynccl"),
        HookType.BEFORE,
    )
    HookRegistry.register(
        "sglang.srt.distributed.bootstrap._init_cpu_threads_env",
        threads.init_threads,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.layers.attention.torch_native_backend"
        ".TorchNativeAttnBackend._run_sdpa_forward_extend",
        attention.extend,
        HookType.AROUND,
    )
    transfer.install(f"{_HOST_POOL}.mha", f"{_HOST_POOL}.mla")
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = _wait_for_nothing
