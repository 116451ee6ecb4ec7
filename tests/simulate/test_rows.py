import io
import itertools
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.simulator.requests import Request
from cacheflow_sgl.core.simulator.setup import Boundary, Engine
from cacheflow_sgl.simulate.rows import Environment, Row, rows_of
from cacheflow_sgl.simulate.runs import runs_of
from cacheflow_sgl.simulate.show import print_rows
from cacheflow_sgl.simulate.workload import Prompts, Trace

from .stand import case, rows, short_trace


@pytest.fixture(scope="module")
def given_rows() -> list[Row]:
    no_cake = tuple(map(BatchPolicyName, ("recompute", "load", "fifo", "cacheflow")))
    stages = case(Prompts((2048, 8192), 64), stages=2)
    return [*rows(case(), case(gbps=40)), *rows(stages, policies=no_cake)]


@pytest.fixture(scope="module")
def trace_rows() -> list[Row]:
    return rows(case(short_trace(60)), case(short_trace(60), gbps=40))


def shown(given: list[Row]) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_rows(given, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_ratios_are_over_the_better_single_way_of_the_case(given_rows, trace_rows):
    for at in range(0, len(given_rows), 4):
        same = given_rows[at : at + 4]
        recompute, load = (row.ttft_s.mean for row in same[:2])
        best = "recompute" if recompute < load else "load"
        assert {row.best_single for row in same} == {best}
        for row in same:
            assert row.ratio_to_best_single == row.ttft_s.mean / min(recompute, load)
    assert {row.best_single for row in given_rows} == {"recompute", "load"}


def test_without_a_single_way_there_is_no_ratio():
    (row,) = rows(case(), policies=(BatchPolicyName.CAKE,))
    assert row.ratio_to_best_single is None
    assert row.best_single is None
    assert " - " in shown([row])


def arriving(requests: list[Request]) -> Row:
    (row,) = rows(
        case(Trace("t", requests, 512, 10**6, None)), policies=(BatchPolicyName.RECOMPUTE,)
    )
    return row


def test_a_trace_is_overloaded_where_much_is_left_after_its_last_arrival(given_rows):
    long = [Request(at, 5.0 + at / 2, 20_000, 2000) for at in range(8)]
    row = arriving(long)
    assert row.arrivals_s == 3.5
    # Until the last first token: that the last answer is long is no overload.
    ends = [request.at_s + ttft for request, ttft in zip(long, row.ttft_each_s, strict=True)]
    assert row.behind_s == pytest.approx(max(ends) - 8.5)
    assert row.behind_s < row.end_s - 8.5 - 10
    assert row.overloaded
    few = arriving(long[:2])
    assert few.arrivals_s < few.behind_s < 10 < row.behind_s
    assert not few.overloaded, "what is left is no more than a server may have to do"
    slow = [replace(request, at_s=40 * request.at_s) for request in long]
    assert arriving(slow).behind_s < row.behind_s
    assert not arriving(slow).overloaded
    assert {(each.arrivals_s, each.behind_s) for each in given_rows} == {(None, None)}
    assert not any(each.overloaded for each in given_rows)


def test_what_comes_at_once_or_waits_for_another_turn_is_no_overload():
    together = [Request(at, 0.0, 120_000) for at in range(4)]
    assert arriving(together).behind_s > 10
    assert not arriving(together).overloaded
    turns = [
        Request(0, 0.0, 1000),
        Request(1, 1.0, 1000),
        *(Request(at, 0.0, 120_000, after=at - 1) for at in range(2, 6)),
    ]
    row = arriving(turns)
    assert row.arrivals_s == 1
    assert row.behind_s < 1 < 10 < row.end_s
    assert not row.overloaded


def test_overload_is_one_line_that_names_the_worst(trace_rows):
    late = [
        msgspec.structs.replace(trace_rows[at], arrivals_s=3600.0, behind_s=behind_s)
        for at, behind_s in ((0, 3000.0), (1, 43210.0))
    ]
    (line,) = (line for line in shown([*late, *trace_rows]).splitlines() if "--speed" in line)
    assert line == (
        "2 of 10 rows overloaded: 3,600 s of arrivals, load 43,210 s more; lower --speed"
    )
    text = shown(trace_rows)
    assert "--speed" not in text
    assert "recompute and load;\n" in text, "lines of the legend are not broken"


def test_ratios_are_over_policies_not_engines():
    policies = (BatchPolicyName.LOAD, BatchPolicyName.FIFO)
    engines = (Engine.RECOMPUTE, Engine.STAIRCASE)
    runs = runs_of([case(Prompts((8192,) * 2, 64))], policies, engines)
    found = rows_of([(run, run.result()) for run in runs])
    assert found[1].ttft_s.mean < found[0].ttft_s.mean, "recompute is the better single way here"
    for row in found:
        assert row.best_single == "load"
        assert row.ratio_to_best_single == row.ttft_s.mean / found[0].ttft_s.mean


def test_tokens_add_up(given_rows, trace_rows):
    for row in given_rows:
        prompts = {1: 2 * (2048 + 64), 2: 2048 + 8192 + 2 * 64}[row.pp]
        assert row.tokens.device + row.tokens.loaded + row.tokens.recomputed == prompts
        if row.policy == "load":
            assert row.tokens.recomputed == pytest.approx(2 * 64)
        if row.policy == "recompute":
            assert row.tokens.loaded == 0
    for row in trace_rows:
        tokens = row.tokens
        prompts = sum(request.prompt_tokens for request in short_trace(60).requests)
        assert tokens.device + tokens.loaded + tokens.recomputed == pytest.approx(prompts)
        assert row.tokens.device > 0
        assert (row.tokens.loaded > 0) == (row.policy != "recompute")


def test_figures_are_of_the_requests(trace_rows):
    for row in trace_rows:
        assert row.requests == len(row.ttft_each_s) == 60
        assert row.ttft_s.min == min(row.ttft_each_s)
        assert row.ttft_s.max == max(row.ttft_each_s)
        times = row.ttft_s
        assert times.min <= times.p50 <= times.p90 <= times.p99 <= times.max
        assert 0 < row.compute_busy <= 1
        assert 0 <= row.io_busy <= 1
        assert row.batch is row.prefix_tokens is None


def test_lanes_that_do_all_the_work_are_busy_all_the_time(given_rows):
    for row in given_rows:
        if row.policy == "recompute" and row.pp == 1:
            assert row.compute_busy == pytest.approx(1)
            assert row.io_busy == 0


def test_stages_are_counted_as_one_mean():
    one, *more = (
        rows(case(stages=stages, boundary=boundary), policies=(BatchPolicyName.LOAD,))[0]
        for stages, boundary in itertools.product((1, 2), Boundary)
    )
    for row in more:
        assert row.io_busy <= 1
        assert row.tokens == one.tokens


def test_every_row_says_that_it_is_simulated(given_rows, trace_rows):
    for row in (*given_rows, *trace_rows):
        assert row.simulated == "on a modelled profile"
    measured = msgspec.structs.replace(given_rows[0], simulated="on a measured profile")
    assert shown([measured]).startswith("simulated on a measured profile: h100-qwen3-8b")


def test_tables_fit_80_columns_and_hide_nothing(given_rows, trace_rows):
    wide = msgspec.structs.replace(
        given_rows[3],
        link="100 Gbps",
        workload="131072 x 256",
        ttft_s=msgspec.structs.replace(given_rows[3].ttft_s, mean=12345.6, p50=0.0123, p90=99.9),
        ratio_to_best_single=13.37,
    )
    text = shown([wide, *given_rows, *trace_rows])
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for piece in ("12,346", "0.012", "99.9", "13.37", "100 Gbps, 131072 x 256"):
        assert piece in text
    assert "10 Gbps, 2048 x 2" in text
    assert "2 stages, boundary exact" in text
    assert "t.jsonl, 60 requests" in text


def test_a_case_is_said_once(given_rows):
    assert shown(given_rows[:8]).count(" Gbps, 2048 x 2") == 2


def test_the_environment_says_what_made_the_rows():
    environment = Environment.now()
    assert environment.versions.keys() == {"python", "cacheflow-sgl", "numpy"}
    assert environment.command
