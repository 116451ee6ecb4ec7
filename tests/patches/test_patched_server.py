"""A server on a patched SGLang, without the seams of the plugin that the patches provide."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheflow_sgl.client import ServerProcess
from tests.harness.prompts import PAGE, random_prompt

pytestmark = pytest.mark.engine


@pytest.fixture
def patched_server(
    patched_sglang: Path, tiny_model: Path, tmp_path: Path
) -> Iterator[ServerProcess]:
    options = {"directory": str(tmp_path / "pages"), "prefetch_threshold": PAGE}
    with ServerProcess(
        tiny_model,
        [
            "--enable-hierarchical-cache",
            *("--hicache-storage-backend", "cacheflow"),
            *("--hicache-storage-backend-extra-config", json.dumps(options)),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--page-size", str(PAGE)),
            "--enable-metrics",
            "--enable-cache-report",
        ],
        log_path=tmp_path / "server.log",
        # Without a GPU the plugin also brings what SGLang lacks there, so it stays on itself.
        env={"PYTHONPATH": str(patched_sglang), "CACHEFLOW_PLUGIN_SEAMS": "off"},
    ) as running:
        yield running


def wait_until_stored(server: ServerProcess, pages: int) -> None:
    deadline = time.monotonic() + 60
    while server.client.metrics().total("cacheflow:tier_written_records_total") < pages:
        assert time.monotonic() < deadline, server.log_tail()
        time.sleep(0.2)


def test_it_serves_and_restores(patched_server: ServerProcess) -> None:
    prompt = random_prompt(8 * PAGE + 17, seed=1)
    ask = patched_server.client.generate
    computed = ask(prompt, max_new_tokens=8, logprobs=True)
    assert computed.cached.total == 0
    wait_until_stored(patched_server, pages=8)
    patched_server.client.flush_cache()
    restored = ask(prompt, max_new_tokens=8, logprobs=True)
    assert restored.cached.storage == 8 * PAGE
    assert restored.output_ids == computed.output_ids
    assert restored.logprobs == pytest.approx(computed.logprobs, abs=1e-4)
