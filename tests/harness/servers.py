"""The shapes of server that tests share, and what a test does to one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cacheflow_sgl.client import ServerProcess, SglangClient
from tests.harness.plugin.cacheflow_test_plugin import SWITCH_VARIABLE
from tests.harness.prompts import PAGE, random_prompt

_PLUGIN_DIRECTORY = Path(__file__).parent / "plugin"
_DEVICE_TOKENS = 4096
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
    """

    def __init__(self, shape: Shape, model: Path, directory: Path) -> None:
        self.directory = directory
        self._switch = directory / "spoil-loads"
        self.process = ServerProcess(
            model,
            (*_FLAGS, *shape.flags, *(self._storage_flags() if shape.stores else ())),
            env={
                **dict(shape.env),
                "PYTHONPATH": str(_PLUGIN_DIRECTORY),
                SWITCH_VARIABLE: str(self._switch),
                "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(directory / "file-pages"),
            },
            log_path=directory / "server.log",
            admin_key="admin",
        )

    def _storage_flags(self) -> tuple[str, ...]:
        options = {"directory": str(self.directory / "launch-pages"), "prefetch_threshold": PAGE}
        return (
            *("--hicache-storage-backend", "cacheflow"),
            *("--hicache-storage-backend-extra-config", json.dumps(options)),
        )

    @property
    def client(self) -> SglangClient:
        """A client that may call everything."""
        return self.process.client

    def evict_device(self) -> None:
        """Push every prefix out of the device pool by computing others; the host keeps them."""
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
