"""A whole bench on a server whose times are known: what each figure of a row is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from cacheflow_sgl.bench.options import POLICIES, RestoreOptions
from cacheflow_sgl.bench.protocol import BenchError
from cacheflow_sgl.bench.rounds import Bench, planned_requests, round_order, warm_up_order
from cacheflow_sgl.bench.rows import Row, rows_of
from cacheflow_sgl.bench.show import faults, lane_lines
from tests.bench.stand import OVERHEAD_S, SUFFIX_S, Stand

PREFIX = 2048
RECOMPUTE_S = PREFIX * 0.001


def bench(stand: Stand, **options: Any) -> list[Row]:
    chosen = RestoreOptions(**{"prefix_tokens": (PREFIX,), "repeats": 7} | options)
    steps: list[None] = []
    measure = Bench(stand, stand, chosen, lambda: steps.append(None)).measure()  # type: ignore[arg-type]
    rows = [row for measurement in measure for row in rows_of(measurement, chosen.policies)]
    assert len(steps) == planned_requests(chosen)
    return rows


def by_policy(rows: list[Row]) -> dict[str, Row]:
    return {row.policy: row for row in rows}


def test_at_equal_rates_a_split_takes_half_and_reaches_its_bound():
    rows = by_policy(bench(Stand(), policies=POLICIES))
    recompute, load, split = rows["recompute"], rows["load"], rows["split"]
    rest_s = OVERHEAD_S + SUFFIX_S
    assert recompute.ttft_s.median == pytest.approx(RECOMPUTE_S + rest_s)
    assert load.ttft_s.median == pytest.approx(RECOMPUTE_S + rest_s)
    assert split.ttft_s.median == pytest.approx(RECOMPUTE_S / 2 + rest_s)
    assert split.ttft_each_s == pytest.approx([RECOMPUTE_S / 2 + rest_s] * 7)
    assert split.bound_s == pytest.approx(split.ttft_s.median)
    assert split.ratio_to_bound == pytest.approx(1)
    assert split.ratio_to_bound_interval == pytest.approx((1, 1))
    assert split.ratio_to_best_single == pytest.approx(
        (RECOMPUTE_S / 2 + rest_s) / (RECOMPUTE_S + rest_s)
    )
    assert recompute.ratio_to_best_single == pytest.approx(1)
    assert (split.choice, split.reason, split.meet_tokens) == ("split", "told", PREFIX / 2)
    assert (recompute.meet_tokens, load.choice) == (PREFIX, "load")
    assert recompute.balance_reached == pytest.approx(1)
    assert all(row.outputs_equal and row.max_abs_dlogprob == 0 for row in rows.values())
    assert faults(list(rows.values())) == []


def test_lanes_are_seen_by_the_bench_itself():
    rows = by_policy(bench(Stand(), policies=POLICIES))
    split = rows["split"]
    assert split.restore_s == pytest.approx(RECOMPUTE_S / 2)
    assert (split.compute_busy, split.io_busy) == (pytest.approx(1), pytest.approx(1))
    assert split.lane_overlap == pytest.approx(1)
    assert (split.compute_slowdown, split.io_slowdown) == (pytest.approx(1), pytest.approx(1))
    recompute, load = rows["recompute"], rows["load"]
    assert (recompute.compute_busy, recompute.io_busy) == (pytest.approx(1), 0)
    assert (load.compute_busy, load.io_busy) == (0, pytest.approx(1))
    assert recompute.lane_overlap is load.lane_overlap is None
    assert recompute.io_slowdown is load.compute_slowdown is None
    assert lane_lines([recompute, load, split]) == [
        "split: lanes overlap 100%; beside each other compute takes 1.00x as long, loads 1.00x"
    ]


@pytest.mark.parametrize(("balance", "best"), [(0.5, "recompute"), (2.0, "load")])
def test_a_balance_is_a_rate_of_the_link(balance: float, best: str):
    rows = bench(Stand(), balances=(balance,))
    for row in rows:
        assert row.throttle_bytes_per_s == pytest.approx(PREFIX * 100 * balance / RECOMPUTE_S)
        assert row.lane_rate_reached == pytest.approx(1)
        assert row.balance_reached == pytest.approx(balance)
        single = {"sglang": "load"}.get(row.best_single, row.best_single)
        assert single == best
        seconds = RECOMPUTE_S / (1 + balance) + OVERHEAD_S + SUFFIX_S
        assert row.bound_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("slower", "reason"), [("sglang", "our own load"), ("load", "SGLang's own load-back")]
)
def test_the_better_of_both_loads_is_the_row(slower: str, reason: str):
    load = by_policy(bench(Stand(extra_s={slower: 1.0}), balances=(2,)))["load"]
    assert load.reason == reason
    assert load.ttft_s.max < RECOMPUTE_S
    assert load.ratio_to_best_single == pytest.approx(1)


def test_what_drifts_is_not_in_a_ratio():
    steady = by_policy(bench(Stand()))["recompute"]
    drifting = by_policy(bench(Stand(drift=0.998)))["recompute"]
    assert drifting.ttft_s.min < 0.95 * drifting.ttft_s.max
    assert drifting.ratio_to_bound == pytest.approx(steady.ratio_to_bound, rel=0.1)
    assert drifting.balance_reached < 0.95  # compute got faster, the throttle stayed


def test_loads_that_fall_short_of_the_throttle_void_a_run():
    rows = bench(Stand(link_share=0.9))
    assert all(row.void for row in rows)
    (fault,) = faults(rows)
    assert fault == (
        "void: at 2048 tokens, balance 1, load reached 0.90 of the throttle; "
        "less than 0.95 is no such balance"
    )
    assert not any(row.void for row in bench(Stand(link_share=0.96)))


def test_an_output_that_differs_is_a_fault():
    rows = bench(Stand(wrong_policy="cake"))
    assert [row.policy for row in rows if not row.outputs_equal] == ["cake"]
    assert faults(rows) == [
        "wrong: at 2048 tokens, balance 1, an output of cake differs from the control's"
    ]


def test_every_prefix_length_and_balance_has_its_rows():
    rows = bench(Stand(), prefix_tokens=(512, 1024), balances=(1, 2), policies=("cake",), repeats=2)
    assert [(row.prefix_tokens, row.balance) for row in rows] == [
        (512, 1),
        (512, 2),
        (1024, 1),
        (1024, 2),
    ]


def test_each_variant_runs_once_a_round():
    stand = Stand()
    options = RestoreOptions()
    bench(stand, prefix_tokens=(512,), repeats=5)
    counted = 5 * (len(options.variants) + 1)
    rounds = [*zip(*[iter(stand.asked[-counted:])] * (len(options.variants) + 1), strict=True)]
    assert len(rounds) == 5
    for first, hit, *others in rounds:
        assert hit == "sglang"
        assert sorted([first, *others]) == sorted(options.variants)


@pytest.mark.parametrize(
    ("stand", "message"),
    [
        (Stand(reports=False), "no report came with policy load"),
        (Stand(lost_tokens=64), "SGLang found 1984 of 2048 prefix tokens"),
    ],
)
def test_a_server_that_does_something_else_is_an_error(stand: Stand, message: str):
    with pytest.raises(BenchError, match=message):
        bench(stand)


def test_a_server_that_loads_where_it_is_to_recompute_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Stand, "way", staticmethod(lambda _policy: "load"))
    with pytest.raises(BenchError, match="asked to recompute 2048 tokens, the server computed 0"):
        bench(Stand())


def test_a_prompt_that_was_cached_already_is_an_error():
    class Remembers(list):
        def __contains__(self, _prompt: object) -> bool:
            return True

    with pytest.raises(BenchError, match="had cached a prompt"):
        bench(Stand(host=Remembers()))


def test_orders_rotate_so_that_no_variant_has_a_place():
    variants = ("a", "b", "c", "d")
    orders = [round_order(variants, number) for number in range(8)]
    assert all(sorted(order) == sorted(variants) for order in orders)
    for place in range(4):
        assert sorted(order[place] for order in orders) == sorted(variants * 2)
    followers = {(before, after) for order in orders for before, after in pairwise(order)}
    assert {("a", "b"), ("b", "a")} <= followers


def test_the_policy_that_learns_is_warmed_up_three_times():
    order = warm_up_order(("recompute", "sglang", "load", "cacheflow"))
    assert order == ["recompute", "sglang", "load", "cacheflow", "cacheflow", "cacheflow"]
    assert warm_up_order(("recompute", "load")) == ["recompute", "load"]
