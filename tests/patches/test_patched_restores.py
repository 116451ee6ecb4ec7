"""Restores on a patched SGLang: with our plugin off, and with plugin and patch together."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cacheflow_sgl.bench import CONTROL_VARIABLE
from cacheflow_sgl.bench.protocol import Control
from cacheflow_sgl.client import Generation, ServerProcess, SglangClient
from tests.harness.equality import compare
from tests.harness.prompts import PAGE, random_prompt
from tests.harness.reference import Reference

from .conftest import REPOSITORY

pytestmark = [pytest.mark.engine, pytest.mark.full]

STOCK_PLUGIN = REPOSITORY / "tests" / "patches" / "plugin"
NEW_TOKENS = 6
PREFIX = 32 * PAGE
PROMPT = random_prompt(PREFIX + 17, seed=1)
LONGER = random_prompt(PREFIX + 600, seed=1)
"""Begins as `PROMPT`; what follows the prefix takes two chunks."""
FAST = 8e6
SLOW = 0.2e6
"""Bytes per second of the link: near the rate at which a CPU computes this model, and far below."""


@dataclass(frozen=True)
class Machine:
    """A server, and the link by which its prefixes come back from the host."""

    process: ServerProcess
    link: Control

    @property
    def client(self) -> SglangClient:
        return self.process.client

    def ask(self, prompt: list[int], way: str | None, rid: str) -> tuple[Generation, Any]:
        """The answer and its restore report."""
        params = None if way is None else {"cacheflow_restore": way}
        with self.client.stream(
            prompt, max_new_tokens=NEW_TOKENS, logprobs=True, rid=rid, custom_params=params
        ) as stream:
            answer = list(stream)[-1].answer
        return Generation.from_answer(answer), answer["meta_info"].get("cacheflow_restore")

    def evict(self) -> None:
        """Leave the prefixes on the host alone."""
        self.link.evict_device()


@pytest.fixture(scope="module", params=["cacheflow_stock", "cacheflow"], ids=["patch", "both"])
def machine(
    request: pytest.FixtureRequest,
    patched_sglang: Path,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("patched-restores")
    options = {"directory": str(directory / "pages"), "prefetch_threshold": 10**6}  # never fetched
    link = Control(directory / "link")
    link.set_rate(FAST)
    with ServerProcess(
        tiny_model,
        [
            *("--page-size", str(PAGE)),
            *("--chunked-prefill-size", "512"),
            *("--max-total-tokens", "8192"),
            *("--max-running-requests", "8"),
            "--enable-hierarchical-cache",
            *("--hicache-ratio", "3"),
            *("--hicache-storage-backend", "cacheflow"),
            *("--hicache-storage-backend-extra-config", json.dumps(options)),
        ],
        log_path=directory / "server.log",
        env={
            "PYTHONPATH": os.pathsep.join([str(patched_sglang), str(STOCK_PLUGIN)]),
            "SGLANG_PLUGINS": request.param,
            CONTROL_VARIABLE: str(link.path),
            "SGLANG_CPU_OMP_THREADS_BIND": "0",  # loads have the other core
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        },
    ) as process:
        yield Machine(process, link)


def test_each_way_gives_the_controls_answer_and_reports(machine: Machine, tiny_model: Path) -> None:
    control = [Reference(tiny_model).generate(PROMPT, NEW_TOKENS)]
    machine.client.flush_cache()
    cold, report = machine.ask(PROMPT, None, "cold")
    assert report is None
    assert compare(control, [cold]).same
    for way in ("split", "load", "recompute"):
        machine.evict()
        answer, reports = machine.ask(PROMPT, way, way)
        assert compare(control, [answer]).same, way
        [report] = reports
        assert (report["policy"], report["way"], report["rid"]) == (way, way, way)
        assert (report["start"], report["stop"]) == (0, PREFIX)
        computed, loaded = report["computed_tokens"], report["loaded_tokens"]
        assert computed + loaded == PREFIX, way
        assert (computed > 0, loaded > 0) == (way != "load", way != "recompute"), report
        assert (report["io_s"] > 0) == (way != "recompute"), report
        if way == "split":
            assert report["compute_s"] > 0, "the patched worker times its forwards"
    machine.evict()
    answer, [report] = machine.ask(PROMPT, "sglang", "stock")
    assert compare(control, [answer]).same
    assert report == {"policy": "sglang", "way": "sglang", "reason": "policy"}


def test_others_are_admitted_beside_a_parked_restore(machine: Machine, tiny_model: Path) -> None:
    control = [Reference(tiny_model).generate(LONGER, NEW_TOKENS)]
    machine.client.flush_cache()
    machine.ask(PROMPT, None, "fill")
    machine.evict()
    machine.ask(PROMPT, "load", "learn")
    # The first load is as long as it was right for the fast link: compute comes to it and waits.
    machine.link.set_rate(SLOW)
    machine.evict()
    machine.link.new_log()
    answers: list[Any] = []
    restoring = threading.Thread(
        target=lambda: answers.append(machine.ask(LONGER, "split", "restoring"))
    )
    restoring.start()
    short = 0
    while restoring.is_alive():
        prompt = random_prompt(PAGE // 2, seed=100 + short)
        assert machine.client.generate(prompt, max_new_tokens=1).finish_reason == "length"
        short += 1
    restoring.join()
    machine.link.set_rate(FAST)
    machine.evict()

    [(answer, [report])] = answers
    assert compare(control, [answer]).same
    assert report["computed_tokens"] + report["loaded_tokens"] == PREFIX
    computes = [
        any(part.rid == "restoring" for part in forward.parts)
        for forward in machine.link.new_log().forwards
    ]
    last = len(computes) - computes[::-1].index(True)
    assert False in computes[computes.index(True) : last], "it was never parked beside another"
