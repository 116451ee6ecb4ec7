"""Prefixes whose chunks lie in two tiers: both links load at once, whichever comes first."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.profiles import load_profile
from cacheflow_sgl.core.simulator.requests import together
from cacheflow_sgl.core.simulator.result import Piece, Result
from cacheflow_sgl.core.simulator.setup import OWN_ENGINE, Engine, Setup
from cacheflow_sgl.core.simulator.simulation import Simulation
from cacheflow_sgl.core.simulator.world import GBPS, Link, World
from tests.core.simulator.worlds import CHUNK, cost, link, placed, world

PROFILES = Path(__file__).parents[3] / "profiles"
SUFFIX = 64

modelled = pytest.mark.parametrize("name", ["h100-qwen3-8b", "a100-qwen3-8b"])


def run(name: str, gbps: tuple[float, float], tiers: tuple[int, ...], policy: str) -> Result:
    """One prefix, chunk by chunk in these tiers, on a server with two links."""
    mine = World.of(
        load_profile(PROFILES / f"{name}.json"), [Link(0.0, each * GBPS) for each in gbps]
    )
    chosen = BatchPolicyName(policy)
    setup = Setup(OWN_ENGINE.get(chosen, Engine.STAIRCASE), chosen, record=True)
    requests = together([len(tiers) * mine.chunk + SUFFIX])
    return Simulation(mine, setup, requests, placed(tiers)).run()


def ttft_s(name: str, gbps: tuple[float, float], tiers: tuple[int, ...], policy: str) -> float:
    return run(name, gbps, tiers, policy).mean_ttft_s


def overlap_s(ones: list[Piece], others: list[Piece]) -> float:
    """Seconds during which pieces of both lanes are on their way."""
    both = ((one, other) for one in ones for other in others)
    return sum(max(min(a.stop_s, b.stop_s) - max(a.start_s, b.start_s), 0.0) for a, b in both)


@modelled
@pytest.mark.parametrize("chunks", [8, 16, 64])
def test_halves_in_two_tiers_use_both_links(name: str, chunks: int) -> None:
    half, gbps = chunks // 2, (40.0, 40.0)
    orders = ((1,) * half + (0,) * half, (0,) * half + (1,) * half)
    load_s = [ttft_s(name, gbps, tiers, "load") for tiers in orders]
    assert load_s[0] == pytest.approx(load_s[1], rel=0.01)
    recompute_s = ttft_s(name, gbps, orders[0], "recompute")
    for tiers in orders:
        result = run(name, gbps, tiers, "cacheflow")
        assert result.mean_ttft_s <= 1.02 * min(recompute_s, load_s[0])
        links = [result.lanes[f"I/O 0.{tier}"] for tier in (0, 1)]
        together_s = overlap_s(links[0].pieces, links[1].pieces)
        assert together_s > 0.5 * min(link.busy_s for link in links)


@modelled
@pytest.mark.parametrize("gbps", [(40.0, 5.0), (5.0, 5.0), (10.0, 5.0)])
def test_a_fast_front_does_not_chain_compute_to_a_slow_tail(
    name: str, gbps: tuple[float, float]
) -> None:
    """What is loaded of the front can't be passed: all behind it would come from the slow tier."""
    tiers = (0,) * 3 + (1,) * 13
    assert ttft_s(name, gbps, tiers, "cacheflow") < 0.9 * ttft_s(name, gbps, tiers, "recompute")


rates = st.sampled_from([5.0, 20.0, 40.0, 80.0])


def test_a_link_is_asked_again_when_another_has_begun() -> None:
    """Link 0 may take nothing while all 5 s behind its chunks are unclaimed, and is asked first."""
    mine = world(cost(), link(0.4), link(5.0))
    requests = together([4 * CHUNK + CHUNK])
    lanes = Simulation(mine, Setup(record=True), requests, placed((0, 0, 0, 1))).run().lanes
    assert [lanes[f"I/O 0.{tier}"].pieces[0].start_s for tier in (0, 1)] == [0.0, 0.0]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["h100-qwen3-8b", "a100-qwen3-8b"]),
    st.tuples(rates, rates),
    st.lists(st.integers(0, 1), min_size=2, max_size=16).map(tuple),
)
def test_two_tiers_are_never_worse_than_a_single_way(
    name: str, gbps: tuple[float, float], tiers: tuple[int, ...]
) -> None:
    single_s = min(ttft_s(name, gbps, tiers, policy) for policy in ("recompute", "load"))
    # Where a slow link has one chunk only, its last pieces come before the suffix, not beside it.
    assert ttft_s(name, gbps, tiers, "cacheflow") <= 1.06 * single_s


@modelled
@pytest.mark.parametrize("engine", [Engine.CAKE, Engine.V1])
def test_token_wise_engines_load_each_chunk_over_its_own_link(name: str, engine: Engine) -> None:
    tiers = (1, 1, 0, 0, 1, 0, 1, 0)
    mine = World.of(load_profile(PROFILES / f"{name}.json"), [Link(0.0, 40 * GBPS)] * 2)
    setup = Setup(engine, BatchPolicyName.CAKE, record=True)
    requests = together([len(tiers) * mine.chunk + SUFFIX])
    result = Simulation(mine, setup, requests, placed(tiers)).run()
    for tier in (0, 1):
        spans = [piece.span for piece in result.lanes[f"I/O 0.{tier}"].pieces]
        assert spans
        chunks = {at // mine.chunk for span in spans for at in range(span.start, span.stop, 64)}
        assert {tiers[chunk] for chunk in chunks} == {tier}
