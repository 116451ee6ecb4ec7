"""What each policy plans and claims."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow_sgl.core import plans
from cacheflow_sgl.core.costs import ComputeCost, LinkCost
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.plans import Costs, Way
from cacheflow_sgl.core.policies import Planner, Policy, is_overdue

CHUNK, PAGE = 512, 64
SPAN = Span(64, 64 + 8192)


def planner(balance=None, chunk=CHUNK, page=PAGE):
    """With a balance: seconds to compute all over seconds to load all; else nothing is known."""
    costs = Costs(ComputeCost(), LinkCost(), 1000)
    if balance is not None:
        for rows in (128, 512):
            costs.compute.observe(0, rows, rows * 1e-4 * balance)
        for tokens in (64, 512):
            costs.link.observe(tokens * 1000, tokens * 1e-4)
    return Planner(chunk, page, costs)


@pytest.mark.parametrize("balance", [None, 0.01, 1, 100])
@pytest.mark.parametrize(
    ("policy", "way"),
    [
        (Policy.RECOMPUTE, Way.RECOMPUTE),
        (Policy.LOAD, Way.LOAD),
        (Policy.SPLIT, Way.SPLIT),
        (Policy.CAKE, Way.SPLIT),
    ],
)
def test_a_way_that_was_asked_for_is_taken_whatever_it_costs(policy, way, balance):
    plan = planner(balance).plan(policy, SPAN)
    assert (plan.way, plan.reason) == (way, "forced")
    if way is not Way.SPLIT:
        assert plan.meeting == {Way.RECOMPUTE: SPAN.stop, Way.LOAD: SPAN.start}[way]
    assert bool(plan.expected_s) == (balance is not None)


@pytest.mark.parametrize(
    ("balance", "way"), [(None, Way.SPLIT), (1, Way.SPLIT), (0.01, Way.RECOMPUTE), (100, Way.LOAD)]
)
def test_cacheflow_goes_by_what_is_known(balance, way):
    mine = planner(balance)
    plan = mine.plan(Policy.CACHEFLOW, SPAN)
    assert plan.way is way
    assert plan == plans.plan(SPAN, chunk=CHUNK, page=PAGE, costs=mine.costs)


def test_what_is_left_to_sglang_has_no_plan():
    with pytest.raises(ValueError, match="sglang"):
        planner().plan(Policy.SGLANG, SPAN)


@given(
    gap_pages=st.integers(1, 300),
    chunk=st.integers(1, 2048),
    page=st.sampled_from([1, 16, 64, 256]),
    balance=st.sampled_from([None, 0.01, 1, 100]),
)
def test_cake_claims_whole_chunks_in_both_lanes(gap_pages, chunk, page, balance):
    mine, gap = planner(balance, chunk, page), gap_pages * page
    sizes = {
        mine.compute_claim(Policy.CAKE, position=0, gap=gap, load_in_flight=64),
        mine.load_claim(Policy.CAKE, position=0, gap=gap),
    }
    (size,) = sizes
    assert size == min(gap, max(page, chunk // page * page))


@pytest.mark.parametrize("policy", [Policy.CACHEFLOW, Policy.SPLIT, Policy.LOAD, Policy.RECOMPUTE])
@pytest.mark.parametrize("balance", [None, 1])
def test_the_others_claim_as_plans_say(policy, balance):
    mine = planner(balance)
    for gap in (64, 640, 8192):
        where = {"position": 64, "gap": gap}
        fixed = {"chunk": CHUNK, "page": PAGE, "costs": mine.costs}
        busy = {"load_in_flight": 128, "compute_in_flight_s": 0.01}
        assert mine.compute_claim(policy, **where, **busy) == plans.compute_claim(
            **where, **busy, **fixed
        )
        assert mine.compute_claim(policy, **where) == plans.compute_claim(**where, **fixed)
        assert mine.load_claim(policy, **where) == plans.load_claim(**where, **fixed)


def test_what_is_in_flight_changes_a_claim():
    """So that a planner which forgot to pass it on would be found out."""
    mine = planner(1)

    def claim(**busy):
        return mine.compute_claim(Policy.CACHEFLOW, position=0, gap=640, **busy)

    assert claim(load_in_flight=256) > claim() > claim(compute_in_flight_s=0.02)


def test_overdue():
    assert not is_overdue(1e9, None), "without an expectation nothing is late"
    assert not is_overdue(2.0, 1.0)
    assert is_overdue(2.1, 1.0)
    assert not is_overdue(0.004, 0.0), "a few milliseconds are not worth a change of plan"
    assert is_overdue(0.006, 0.0)


def test_the_words_are_what_users_write():
    assert [policy.value for policy in Policy] == [
        "cacheflow",
        "recompute",
        "load",
        "split",
        "cake",
        "sglang",
    ]
