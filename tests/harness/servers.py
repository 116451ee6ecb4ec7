"""The shapes of server that tests share, and what a test does to one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cacheflow_sgl.bench import CONTROL_VARIABLE
from cacheflow_sgl.bench.protocol import Control
from cacheflow_sgl.client import ServerProcess, SglangClient
from tests.harness.plugin.cacheflow_test_plugin import SWITCH_VARIABLE
from tests.harness.plugin.restore_faults import DIRECTORY_VARIABLE, IN_FLIGHT_VARIABLE, TestEnd
from tests.harness.prompts import PAGE, random_prompt

_PLUGIN_DIRECTORY = Path(__file__).parent / "plugin"
_DEVICE_TOKENS = 4096
_NEVER = 1_000_000
"""Tokens; no prefix in storage is as long, so none is fetched."""
_FLAGS = (
    *("--page-size", str(PAGE)),
    *("--chunked-prefill-size", "512"),
    *("--max-total-tokens", str(_DEVICE_TOKENS)),
    *("--max-running-requests", "8"),
    "--enable-hierarchical-cache",
    *("--hicache-ratio", "3"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
    "--enable-metrics",
)


@dataclass(frozen=True)
class Shape:
    """A kind of server: tests of one shape share one server."""

    name: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    stores: bool = False
    """Whether it starts with our backend, in the folder `launch-pages`."""
    restores: bool = False
    """Whether it starts so too, but never fetches: prefixes come from the host alone, over a link
    and with faults that tests control."""


DEFAULT = Shape("default")
"""SGLang's defaults: overlap schedule, page_first host pool, kernel transfers."""

NO_OVERLAP = Shape(
    "no-overlap",
    (
        "--disable-overlap-schedule",
        *("--hicache-mem-layout", "page_first_direct"),
        *("--hicache-io-backend", "direct"),
    ),
)

TWO_RANKS = Shape(
    "two-ranks",
    (
        *("--tp-size", "2"),
        *("--hicache-mem-layout", "layer_first"),
        *("--hicache-io-backend", "direct"),
    ),
)

FAILING = Shape(
    "failing-storage",
    env=(
        ("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.05"),
        ("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.2"),
    ),
    stores=True,
)
"""Our backend from the start, and SGLang's own injector of delays and failures around it."""

_RESTORE_FLAGS = ("--max-total-tokens", "8192")
RESTORES = Shape("restores", _RESTORE_FLAGS, restores=True)
"""For restores from the host: SGLang's defaults and a roomy device."""

TIGHT = Shape(
    "restores-tight",
    (
        *("--max-total-tokens", "2048"),
        *("--max-running-requests", "2"),
        *NO_OVERLAP.flags,
        "--enable-priority-scheduling",
    ),
    restores=True,
)
"""For restores from the host: room for little more than one, no overlap, requests preempted."""

IN_FLIGHT = Shape(
    "restores-in-flight",
    ("--max-total-tokens", "2240"),
    env=((IN_FLIGHT_VARIABLE, "1"),),
    restores=True,
)
"""For restores from the host: can leave forwards in flight, with room for little more than one."""


def _matrix(page: int, chunk: int, *, overlap: bool, mixed: bool) -> Shape:
    name = f"restores-page{page}-chunk{chunk}"
    flags = ["--page-size", str(page), "--chunked-prefill-size", str(chunk), *_RESTORE_FLAGS]
    if mixed:
        flags, name = [*flags, "--enable-mixed-chunk"], f"{name}-mixed"
    if not overlap:
        flags, name = [*flags, *NO_OVERLAP.flags], f"{name}-no-overlap"
    return Shape(name, tuple(flags), restores=True)


MATRIX = tuple(
    _matrix(page, chunk, overlap=(row + column) % 2 == 0, mixed=(row + column) % 3 != 1)
    for row, page in enumerate((1, 16, 64))
    for column, chunk in enumerate((256, 512, 2048))
)
"""Every page size with every chunk; each of them with and without overlap, and mixed chunks."""

OUTSIDE = (
    Shape("outside-two-ranks", TWO_RANKS.flags, stores=True),
    Shape("outside-write-back", ("--hicache-write-policy", "write_back"), stores=True),
    # SGLang's own share of memory comes out negative there.
    Shape(
        "outside-no-chunks",
        ("--chunked-prefill-size", "-1", "--mem-fraction-static", "0.5"),
        stores=True,
    ),
)
"""Servers that make no restores of ours."""


def uses(*shapes: Shape) -> pytest.MarkDecorator:
    """Run a test with the fixture `server` on each of `shapes`."""
    return pytest.mark.parametrize(
        "_server", shapes, ids=[shape.name for shape in shapes], indirect=True
    )


class SharedServer:
    """A running server of some shape.

    Attributes:
        process: the server itself.
        directory: a folder for what belongs to it: log, pages.
        shape: what it was started as.
        link: the link from host to device, and eviction; of a shape that `restores`.
        faults: what goes wrong with its restores, and their state; likewise.
    """

    def __init__(self, shape: Shape, model: Path, directory: Path) -> None:
        self.directory = directory
        self.link = Control(directory / "link")
        self.faults = TestEnd(directory)
        self.shape = shape
        self._switch = directory / "spoil-loads"
        self.process = ServerProcess(
            model,
            (*_FLAGS, *shape.flags, *self._storage_flags()),
            env={
                **dict(shape.env),
                **(self._restore_env() if shape.restores else {}),
                "PYTHONPATH": str(_PLUGIN_DIRECTORY),
                SWITCH_VARIABLE: str(self._switch),
                "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(directory / "file-pages"),
            },
            log_path=directory / "server.log",
            admin_key="admin",
        )

    def _restore_env(self) -> dict[str, str]:
        return {
            CONTROL_VARIABLE: str(self.link.path),
            DIRECTORY_VARIABLE: str(self.directory),
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
            # One core computes, so that loads have the other.
            "SGLANG_CPU_OMP_THREADS_BIND": "0",
        }

    @property
    def storage_options(self) -> dict[str, Any]:
        """Options of our backend, as a server has them that starts with it."""
        threshold = _NEVER if self.shape.restores else PAGE
        return {"directory": str(self.directory / "launch-pages"), "prefetch_threshold": threshold}

    def _storage_flags(self) -> tuple[str, ...]:
        if not (self.shape.stores or self.shape.restores):
            return ()
        return (
            *("--hicache-storage-backend", "cacheflow"),
            *("--hicache-storage-backend-extra-config", json.dumps(self.storage_options)),
        )

    @property
    def client(self) -> SglangClient:
        """A client that may call everything."""
        return self.process.client

    def evict_device(self) -> None:
        """Push every prefix out of the device pool; the host keeps them."""
        if self.shape.restores:
            self.link.evict_device()
            return
        for filler in range(4):
            self.client.generate(
                random_prompt(_DEVICE_TOKENS // 4 + PAGE, seed=1000 + filler), max_new_tokens=1
            )

    def wait_until_stored(self, tokens: float, timeout_s: float = 60) -> None:
        """Wait until `stored_tokens` is at least `tokens`; it grows in the background."""
        deadline = time.monotonic() + timeout_s
        while self.stored_tokens() < tokens:
            assert time.monotonic() < deadline, (
                f"{self.stored_tokens()} of {tokens} tokens stored; {self.process.log_tail()}"
            )
            time.sleep(0.2)

    def stored_tokens(self) -> float:
        """Tokens written to storage since the start, as SGLang counts them."""
        return self.client.metrics().total("sglang:backuped_tokens_total", tp_rank="0")

    @contextmanager
    def spoiled_loads(self) -> Iterator[None]:
        """While open, every KV page loaded to the device is zeroed there."""
        self._switch.touch()
        try:
            yield
        finally:
            self._switch.unlink()
