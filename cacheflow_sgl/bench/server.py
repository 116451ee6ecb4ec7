"""The server that a bench starts."""

from __future__ import annotations

import json
import math
from pathlib import Path

from cacheflow_sgl.bench import CONTROL_VARIABLE
from cacheflow_sgl.bench.decodes import DECODE_TOKENS
from cacheflow_sgl.bench.options import RestoreOptions
from cacheflow_sgl.client import ServerProcess

_SLOTS = 8


def bench_server(
    model: str, options: RestoreOptions, directory: Path, settings: Path, *, on_cpu: bool
) -> ServerProcess:
    """A server, not started yet, that follows the bench's `settings`.

    On a CPU it computes with one thread, so that a copy has a core of its own as it has on a GPU.

    Args:
        model: directory or name.
        options: what will be measured.
        directory: a folder for its log and pages.
        settings: file of the `Control` that steers it.
        on_cpu: whether there is no GPU.
    """
    env = {CONTROL_VARIABLE: str(settings)}
    if on_cpu:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "0"
    return ServerProcess(
        model,
        server_flags(options, directory / "pages", on_cpu=on_cpu),
        env=env,
        log_path=directory / "server.log",
    )


def server_flags(options: RestoreOptions, pages: Path, *, on_cpu: bool) -> tuple[str, ...]:
    """Flags of `cacheflow serve`."""
    # A restore takes its slots while it computes, beside what the tree still holds.
    restoring = 3 * (max(options.prefix_tokens) + options.page)
    decoding = options.decodes * DECODE_TOKENS
    device = math.ceil((restoring + decoding) / options.page) * options.page
    host = 2 * (sum(options.prefix_tokens) + decoding)
    flags = [
        *("--page-size", str(options.page)),
        *("--chunked-prefill-size", str(options.chunk)),
        *("--max-total-tokens", str(device)),
        *("--max-running-requests", str(_SLOTS + options.decodes)),
        *("--random-seed", str(options.seed)),
        "--enable-hierarchical-cache",
        *("--hicache-write-policy", "write_through"),
        *("--hicache-ratio", str(max(2, math.ceil(host / device)))),
        *("--hicache-storage-backend", "cacheflow"),
        *("--hicache-storage-backend-extra-config", json.dumps({"directory": str(pages)})),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    ]
    if on_cpu:
        flags += ["--hicache-mem-layout", "layer_first", "--hicache-io-backend", "direct"]
    if not options.overlap:
        flags.append("--disable-overlap-schedule")
    return tuple(flags)
