"""How many threads a rank computes with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def count_cores(bind: str) -> int:
    """Cores named by one entry of `SGLANG_CPU_OMP_THREADS_BIND`, such as `0-3,8`."""
    cores: set[int] = set()
    for part in bind.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return len(cores)


def init_threads(original: Callable[..., None], *, local_omp_cpuid: str, **arguments: Any) -> None:
    """Give this rank as many threads as its core set has cores.

    Replaces `_init_cpu_threads_env` of `sglang/srt/distributed/bootstrap.py`, which binds
    threads with an op of `sgl_kernel`, where that op is missing. Only the count is taken from
    the core set: where threads run is left to the system, so that a rank's load threads may
    use a core that another rank leaves idle.
    """
    # Said here because plugins run before SGLang has set its logging up.
    logger.info(
        "CPU device: host pools are not pinned, KV moves by index copy, groups use gloo, "
        "extend attention costs rows x context"
    )
    if hasattr(torch.ops.sgl_kernel, "init_cpu_threads_env"):
        original(local_omp_cpuid=local_omp_cpuid, **arguments)
    else:
        torch.set_num_threads(count_cores(local_omp_cpuid))
