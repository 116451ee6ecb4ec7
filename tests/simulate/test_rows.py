import io
import itertools

import msgspec
import pytest
from rich.console import Console

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.simulator.setup import Boundary
from cacheflow_sgl.simulate.rows import Environment, Row
from cacheflow_sgl.simulate.show import print_rows
from cacheflow_sgl.simulate.workload import Prompts

from .stand import case, rows, short_trace


@pytest.fixture(scope="module")
def given_rows() -> list[Row]:
    return rows(case(), case(gbps=40), case(Prompts((2048, 8192), 64), stages=2))


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
