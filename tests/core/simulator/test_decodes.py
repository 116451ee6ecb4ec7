"""Decodes in batches of steps, against requests that decode one step after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.simulator.decodes import Decodes
from cacheflow_sgl.core.simulator.jobs import Job
from cacheflow_sgl.core.simulator.requests import Request
from cacheflow_sgl.core.simulator.result import Served


def job(rid: int, prompt: int, output: int) -> Job:
    return Job(Request(rid, 0.0, prompt, output), Served(rid, 0.0, prompt, output))


def rids(jobs: list[Job]) -> list[int]:
    return [each.request.rid for each in jobs]


@dataclass
class Naive:
    """One request: tokens of its KV and steps that it needs."""

    rid: int
    context: int
    left: int

    def step(self) -> None:
        self.context += 1
        self.left -= 1


arrivals = st.lists(st.tuples(st.integers(1, 50), st.integers(2, 12)), max_size=3)
budgets = st.integers(0, 500) | st.just(math.inf)


@settings(deadline=None)
@given(st.lists(st.tuples(arrivals, budgets), max_size=12), st.integers(0, 5), st.integers(0, 2))
def test_a_batch_of_steps_is_the_same_as_step_by_step(
    turns: list[tuple[list[tuple[int, int]], float]], base: int, per_token: int
) -> None:
    asked: list[int] = []

    def step_s(context: int) -> float:
        asked.append(context)
        return float(base + per_token * context)

    decodes, naive, rid = Decodes(step_s), [], 0
    for arriving, budget in turns:
        for prompt, output in arriving:
            decodes.add(job(rid, prompt, output))
            naive.append(Naive(rid, prompt, output - 1))
            rid += 1
        assert len(decodes) == len(naive)
        if not naive:
            continue

        steps, seconds = decodes.steps_within(budget)
        context = sum(each.context for each in naive)
        each_s = base + per_token * context
        assert asked[-1] == context
        assert seconds == steps * each_s
        until_one_leaves = min(each.left for each in naive)
        assert 1 <= steps <= until_one_leaves
        assert steps == 1 or seconds <= budget
        assert steps == until_one_leaves or seconds + each_s > budget

        for _ in range(steps):
            for each in naive:
                each.step()
        done = [each.rid for each in naive if not each.left]
        naive = [each for each in naive if each.left]
        assert rids(decodes.advance(steps)) == done
        assert len(decodes) == len(naive)


def test_all_that_time_holds_but_nobody_leaves_before_the_last_step() -> None:
    decodes = Decodes(lambda context: 2.0)
    decodes.add(job(0, 10, 6))
    decodes.add(job(1, 10, 4))
    assert decodes.steps_within(100.0) == (3, 6.0)
    assert decodes.steps_within(5.9) == (2, 4.0)
    assert decodes.steps_within(0.0) == (1, 2.0)  # at least one
    assert rids(decodes.advance(3)) == [1]
    assert decodes.steps_within(100.0) == (2, 4.0)
    assert rids(decodes.advance(2)) == [0]
    assert len(decodes) == 0


@pytest.mark.parametrize("step", [0.0, 1e-3])
def test_time_without_end_holds_all_steps_until_one_leaves(step: float) -> None:
    decodes = Decodes(lambda context: step)
    decodes.add(job(0, 10, 5))
    assert decodes.steps_within(math.inf) == (4, 4 * step)


def test_those_that_leave_together_leave_in_order_of_their_ids() -> None:
    decodes = Decodes(lambda context: 1.0)
    for rid in (2, 0, 1):
        decodes.add(job(rid, 10, 3))
    assert decodes.advance(1) == []
    assert rids(decodes.advance(1)) == [0, 1, 2]
