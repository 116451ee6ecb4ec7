"""A server on a patched SGLang with our plugin switched off."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheflow_sgl.client import Generation, ServerProcess
from cacheflow_sgl.cpu.tiny_model import Recipe, write_tiny_model
from tests.harness.equality import ask_all, compare
from tests.harness.prompts import PAGE, random_prompt
from tests.harness.reference import Reference

from .conftest import REPOSITORY

pytestmark = pytest.mark.engine

CPU_PLUGIN = REPOSITORY / "tests" / "harness" / "cpu_plugin"
NEW_TOKENS = 6
PAGES = 8
PROMPT = random_prompt(PAGES * PAGE + 17, seed=1)


@pytest.fixture(scope="module")
def patched_server(
    patched_sglang: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("patched-server")
    options = {"directory": str(directory / "pages"), "prefetch_threshold": PAGE}
    with ServerProcess(
        tiny_model,
        [
            "--enable-hierarchical-cache",
            *("--hicache-storage-backend", "cacheflow"),
            *("--hicache-storage-backend-extra-config", json.dumps(options)),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--page-size", str(PAGE)),
            *("--max-total-tokens", "4096"),
            "--enable-metrics",
            "--enable-cache-report",
        ],
        log_path=directory / "server.log",
        env={
            "PYTHONPATH": os.pathsep.join([str(patched_sglang), str(CPU_PLUGIN)]),
            # Without a GPU, SGLang still needs what it lacks there.
            "SGLANG_PLUGINS": "cacheflow_cpu",
        },
    ) as running:
        yield running


def written(server: ServerProcess) -> float:
    return server.client.metrics().total("cacheflow:tier_written_records_total")


def fill(server: ServerProcess) -> None:
    """Have the pages of the prompt stored, and nothing left on device and host."""
    before = written(server)
    assert server.client.generate(PROMPT, max_new_tokens=1).cached.total == 0
    deadline = time.monotonic() + 60
    while written(server) < before + PAGES:
        assert time.monotonic() < deadline, server.log_tail()
        time.sleep(0.2)
    server.client.flush_cache()


def same(model: Path, answers: list[Generation]) -> bool:
    return compare([Reference(model).generate(PROMPT, NEW_TOKENS)], answers).same


def test_it_serves_and_restores_and_its_pages_follow_the_weights(
    patched_server: ServerProcess, tiny_model: Path, tmp_path: Path
) -> None:
    fill(patched_server)
    restored = ask_all(patched_server.client, [PROMPT], NEW_TOKENS)
    assert restored[0].cached.storage == PAGES * PAGE
    assert same(tiny_model, restored)

    other = write_tiny_model(tmp_path / "other", Recipe(seed=1))
    patched_server.client.update_weights(other)
    answers = ask_all(patched_server.client, [PROMPT], NEW_TOKENS)
    assert answers[0].cached.total == 0
    assert same(other, answers)
    assert not same(tiny_model, answers)

    # What the new weights compute is stored, but in a namespace that the flush leaves behind.
    patched_server.client.flush_cache()
    fill(patched_server)
    restored = ask_all(patched_server.client, [PROMPT], NEW_TOKENS)
    assert restored[0].cached.storage == PAGES * PAGE
    assert same(other, restored)
