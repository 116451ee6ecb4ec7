"""Hundreds of restores with everything that may happen to them, drawn by a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.harness.prompts import PAGE, random_prompt
from tests.harness.restores import Answer, ask, body, checked, fill, post, set_rate
from tests.harness.servers import RESTORES, TIGHT, SharedServer, uses

pytestmark = [pytest.mark.engine, pytest.mark.full]

REQUESTS = 300
POLICIES = ("cacheflow", "cacheflow", "split", "split", "load", "recompute", "cake", "sglang")
RATES = (None, 400, 2000, 5000, 50_000)
LONGEST = 1600


@pytest.fixture
def server(_server: SharedServer) -> Iterator[SharedServer]:
    """The shared server, checked for leaks and contradictions after the test."""
    with checked(_server) as server:
        yield server


@dataclass
class Soak:
    """Rounds of one to four requests at once, until there were `REQUESTS`.

    Attributes:
        controls: the cold answer to each prompt.
        done: requests answered or aborted.
        aborted: those that ended as aborted.
        ways: how many restores took which way.
    """

    server: SharedServer
    draw: random.Random
    pool: ThreadPoolExecutor
    controls: list[tuple[list[int], Answer]] = field(default_factory=list)
    done: int = 0
    aborted: int = 0
    ways: dict[str, int] = field(default_factory=dict)

    def prepare(self) -> None:
        """Six prefixes with two suffixes each, and their cold answers."""
        for number in range(6):
            prefix = random_prompt(self.draw.randrange(4 * PAGE, LONGEST - 2 * PAGE), number)
            for suffix in range(2):
                rest = random_prompt(self.draw.randrange(1, 2 * PAGE), 100 + 2 * number + suffix)
                prompt = prefix + rest
                self.server.faults.emptied()
                (control,) = fill(self.server, prompt)
                self.controls.append((prompt, control))

    def round(self) -> None:
        """Some requests at once, under one rate of the link and one kind of fault."""
        draw, server = self.draw, self.server
        set_rate(server, draw.choice(RATES))
        server.faults.set(
            fail_loads=draw.choice([0, 0, 0, 1, 4]), load_delay_s=draw.choice([0, 0, 0, 0.1])
        )
        chosen = draw.choices(self.controls, k=draw.choice([1, 1, 2, 4]))
        answers: list[tuple[Future[Any], Answer]] = []
        for prompt, control in chosen:
            content = body(prompt, draw.choice(POLICIES), rid=f"soak-{self.done + len(answers):04}")
            answers.append((self.pool.submit(post, server, "/generate", content), control))
        if draw.random() < 0.25:
            time.sleep(draw.random() / 3)
            post(server, "/abort_request", {"rid": f"soak-{self.done:04}"})
        for answer, control in answers:
            self.check(answer.result(120), control)
        self.done += len(answers)
        event = draw.random()
        if event < 0.6:
            server.evict_device()
        elif event < 0.65:
            server.faults.emptied()

    def check(self, content: dict[str, Any], control: Answer) -> None:
        """Right, or aborted."""
        meta = content["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            self.aborted += 1
            return
        answer = Answer.of(content)
        assert answer.same_as(control)
        way = answer.report.get("way", "none")
        self.ways[way] = self.ways.get(way, 0) + 1


@uses(RESTORES, TIGHT)
def test_many_restores_with_everything_that_may_happen(server, capsys):
    with ThreadPoolExecutor(8) as pool:
        soak = Soak(server, random.Random(7), pool)
        soak.prepare()
        told = 0
        while soak.done < REQUESTS:
            soak.round()
            if soak.done >= told + 50:
                told = soak.done
                with capsys.disabled():
                    print(f" {soak.done} of {REQUESTS}: {soak.ways}, {soak.aborted} aborted")
    assert soak.aborted > 0
    assert {"split", "load", "recompute", "sglang"} <= soak.ways.keys()
    assert ask(server, soak.controls[0][0]).same_as(soak.controls[0][1])
