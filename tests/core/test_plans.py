"""Plans and claims: which way, where the pointers meet, and what each lane takes next."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.bounds import meeting_point_bound
from cacheflow_sgl.core.costs import ComputeCost, LinkCost
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.plans import (
    MARGIN,
    Costs,
    Plan,
    Way,
    compute_claim,
    forced,
    load_claim,
    lone_load_claim,
    plan,
)

PAGE = 64
BYTES_PER_TOKEN = 1000
CPU_ROWS_PER_S = 3000


def costs_of(
    *,
    rows_per_s: float = CPU_ROWS_PER_S,
    base_s: float = 0.010,
    tokens_per_s: float = CPU_ROWS_PER_S,
    latency_s: float = 0.0,
) -> Costs:
    """Costs that have been measured on noiseless lanes."""
    costs = Costs(ComputeCost(), LinkCost(), BYTES_PER_TOKEN)
    for size in (64, 512, 4096) * 6:
        costs.compute.observe(0, size, base_s + size / rows_per_s)
        costs.compute.observe(4096, size, base_s + size / rows_per_s)
        costs.link.observe(size * BYTES_PER_TOKEN, latency_s + size / tokens_per_s)
    return costs


def balanced(balance: float, tokens: int, chunk: int) -> Costs:
    """A link on which loading `tokens` takes 1/balance of what recomputing them does."""
    recompute_s = tokens / CPU_ROWS_PER_S + 0.010 * -(-tokens // chunk)
    return costs_of(tokens_per_s=tokens / recompute_s * balance)


def unknown() -> Costs:
    return Costs(ComputeCost(), LinkCost(), BYTES_PER_TOKEN)


costs_strategy = st.builds(
    costs_of,
    rows_per_s=st.floats(500, 50_000),
    base_s=st.floats(0, 0.05),
    tokens_per_s=st.floats(100, 500_000),
    latency_s=st.floats(0, 0.02),
)
chunk_strategy = st.sampled_from([PAGE, 512, 8192])
span_strategy = st.builds(
    lambda start, pages: Span(start * PAGE, (start + pages) * PAGE),
    st.integers(0, 200),
    st.integers(2, 600),
)


# -- the choice


@pytest.mark.parametrize(
    ("balance", "way"),
    [
        (1 / 16, Way.RECOMPUTE),
        (1 / 4, Way.SPLIT),
        (1 / 2, Way.SPLIT),
        (1, Way.SPLIT),
        (2, Way.SPLIT),
        (16, Way.LOAD),
    ],
)
def test_the_way_follows_the_balance(balance: float, way: Way) -> None:
    chosen = plan(Span(0, 4096), chunk=512, page=PAGE, costs=balanced(balance, 4096, 512))
    assert chosen.way is way


def test_equal_lanes_meet_in_the_middle_and_take_half() -> None:
    chosen = plan(Span(0, 4096), chunk=512, page=PAGE, costs=balanced(1, 4096, 512))
    assert chosen.meeting == pytest.approx(2048, abs=2 * PAGE)
    assert re.fullmatch(r"split saves (4\d|50)%", chosen.reason)
    best = min(chosen.expected_s[Way.LOAD], chosen.expected_s[Way.RECOMPUTE])
    assert chosen.expected_s[Way.SPLIT] == pytest.approx(best / 2, rel=0.1)


def test_the_reasons_of_single_ways() -> None:
    fast, slow = (balanced(balance, 4096, 512) for balance in (16, 1 / 16))
    load = plan(Span(64, 4160), chunk=512, page=PAGE, costs=fast)
    assert (load.reason, load.meeting) == ("load alone is as fast", 64)
    recompute = plan(Span(64, 4160), chunk=512, page=PAGE, costs=slow)
    assert (recompute.reason, recompute.meeting) == ("recompute alone is as fast", 4160)


def test_without_an_estimate_both_lanes_are_measured() -> None:
    chosen = plan(Span(640, 4736), chunk=512, page=PAGE, costs=unknown())
    assert chosen == Plan(Way.SPLIT, "no estimate yet", 640 + 2048, {})


def test_one_lane_known_is_not_enough() -> None:
    costs = unknown()
    costs.link.observe(1000, 0.001)
    assert plan(Span(0, 4096), chunk=512, page=PAGE, costs=costs).reason == "no estimate yet"


def test_a_prefix_shorter_than_two_pages_is_loaded() -> None:
    chosen = plan(Span(128, 192), chunk=512, page=PAGE, costs=unknown())
    assert chosen == Plan(Way.LOAD, "prefix shorter than 2 pages", 128, {})


@settings(deadline=None)
@given(span_strategy, chunk_strategy, costs_strategy)
def test_a_plan_is_never_predicted_slower_than_the_better_single_way(
    span: Span, chunk: int, costs: Costs
) -> None:
    chosen = plan(span, chunk=chunk, page=PAGE, costs=costs)
    best = min(chosen.expected_s[Way.LOAD], chosen.expected_s[Way.RECOMPUTE])
    assert chosen.expected_s[chosen.way] <= best
    assert (chosen.way is Way.SPLIT) == (chosen.expected_s[Way.SPLIT] <= (1 - MARGIN) * best)
    assert span.start <= chosen.meeting <= span.stop
    assert chosen.meeting % PAGE == 0


@settings(deadline=None)
@given(span_strategy, chunk_strategy, costs_strategy)
def test_no_split_is_predicted_faster_than_the_bound(span: Span, chunk: int, costs: Costs) -> None:
    chosen = plan(span, chunk=chunk, page=PAGE, costs=costs)
    chunks = [
        (rows, costs.compute.seconds(start, rows))
        for start in range(span.start, span.stop, chunk)
        for rows in [min(chunk, span.stop - start)]
    ]
    bound = meeting_point_bound(
        chunks, BYTES_PER_TOKEN / costs.link.bytes_per_s, load_latency_s=costs.link.latency_s
    )
    # A last forward that is short gets its base cheaper in the bound than it is; the rest is exact.
    assert chosen.expected_s[Way.SPLIT] >= bound.seconds * 0.97 - 1e-9


@settings(deadline=None)
@given(span_strategy, chunk_strategy, st.floats(100, 200_000), st.floats(1.0, 4.0))
def test_a_faster_link_never_raises_the_expected_time(
    span: Span, chunk: int, tokens_per_s: float, faster: float
) -> None:
    slow, fast = (
        plan(span, chunk=chunk, page=PAGE, costs=costs_of(tokens_per_s=rate))
        for rate in (tokens_per_s, tokens_per_s * faster)
    )
    # Whole pages and whole forwards: one more or less of them at the meeting.
    grain_s = 0.010 + 3 * PAGE / CPU_ROWS_PER_S
    assert min(fast.expected_s.values()) <= 1.03 * min(slow.expected_s.values()) + grain_s


@pytest.mark.parametrize("tokens", [4096, 16384, 131072])
@pytest.mark.parametrize("chunk", [512, 8192])
@pytest.mark.parametrize("balance", [0.5, 1, 2])
def test_a_split_is_predicted_close_to_the_bound(balance: float, chunk: int, tokens: int) -> None:
    costs = balanced(balance, tokens, chunk)
    chosen = plan(Span(0, tokens), chunk=chunk, page=PAGE, costs=costs)
    chunks = [(chunk, costs.compute.seconds(0, chunk))] * (tokens // chunk)
    chunks = chunks or [(tokens, costs.compute.seconds(0, tokens))]
    bound = meeting_point_bound(chunks, BYTES_PER_TOKEN / costs.link.bytes_per_s)
    assert chosen.expected_s[Way.SPLIT] <= 1.10 * bound.seconds
    assert chosen.meeting == pytest.approx(bound.token, abs=0.05 * tokens)


@pytest.mark.parametrize("way", list(Way))
def test_a_forced_way_is_taken_and_still_predicted(way: Way) -> None:
    costs = balanced(1, 4096, 512)
    wanted = forced(Span(0, 4096), way, chunk=512, page=PAGE, costs=costs)
    free = plan(Span(0, 4096), chunk=512, page=PAGE, costs=costs)
    meeting = {Way.RECOMPUTE: 4096, Way.LOAD: 0, Way.SPLIT: free.meeting}[way]
    assert wanted == Plan(way, "forced", meeting, free.expected_s)


@pytest.mark.parametrize(
    ("way", "meeting"), [(Way.RECOMPUTE, 4160), (Way.LOAD, 64), (Way.SPLIT, 2112)]
)
def test_a_forced_way_needs_no_estimate(way: Way, meeting: int) -> None:
    wanted = forced(Span(64, 4160), way, chunk=512, page=PAGE, costs=unknown())
    assert wanted == Plan(way, "forced", meeting, {})


# -- claims


def next_compute(
    gap: int,
    costs: Costs,
    *,
    chunk: int = 512,
    load_in_flight: int = 0,
    compute_in_flight_s: float = 0.0,
) -> int:
    return compute_claim(
        position=0,
        gap=gap,
        load_in_flight=load_in_flight,
        chunk=chunk,
        page=PAGE,
        costs=costs,
        compute_in_flight_s=compute_in_flight_s,
    )


def next_load(gap: int, costs: Costs, *, chunk: int = 512) -> int:
    return load_claim(position=0, gap=gap, chunk=chunk, page=PAGE, costs=costs)


@settings(deadline=None)
@given(
    st.integers(1, 2000),
    chunk_strategy,
    st.one_of(costs_strategy, st.builds(unknown)),
    st.integers(0, 4096),
    st.floats(0, 2),
)
def test_claims_are_whole_pages_within_the_gap(
    pages: int, chunk: int, costs: Costs, load_in_flight: int, compute_in_flight_s: float
) -> None:
    gap = pages * PAGE
    compute = next_compute(
        gap,
        costs,
        chunk=chunk,
        load_in_flight=load_in_flight,
        compute_in_flight_s=compute_in_flight_s,
    )
    load = next_load(gap, costs, chunk=chunk)
    may_wait = load_in_flight > 0 and compute_in_flight_s > 0
    assert compute % PAGE == load % PAGE == 0
    assert (0 if may_wait else PAGE) <= compute <= min(gap, chunk)
    assert PAGE <= load <= gap


def test_far_from_the_meeting_a_forward_takes_a_chunk() -> None:
    assert next_compute(16384, costs_of()) == 512


def test_a_short_prefix_is_computed_in_one_forward_that_ends_with_the_loads() -> None:
    costs = costs_of()
    tokens = next_compute(512, costs)
    computing, loading = costs.compute.seconds(0, tokens), costs.load_s(512 - tokens)
    assert computing == pytest.approx(loading, abs=PAGE / CPU_ROWS_PER_S)
    assert next_compute(tokens, costs_of(tokens_per_s=10)) == tokens


def test_loads_in_flight_leave_more_to_compute() -> None:
    costs = costs_of()
    assert next_compute(512, costs, load_in_flight=256) > next_compute(512, costs)


def test_a_forward_in_flight_leaves_less_to_compute() -> None:
    costs = costs_of()
    alone = next_compute(768, costs)
    behind = next_compute(768, costs, compute_in_flight_s=0.1)
    # The link moves 300 tokens in that time; half of them would have been compute's.
    assert alone - behind == pytest.approx(150, abs=PAGE)


def test_a_forward_is_at_least_two_pages() -> None:
    fast_link = costs_of(tokens_per_s=1e6)
    assert next_compute(4096, fast_link) == 2 * PAGE
    assert next_compute(PAGE, fast_link) == PAGE


def test_compute_waits_where_the_loads_bring_the_rest_sooner() -> None:
    costs = costs_of(base_s=0.05)
    rest = 2 * PAGE
    assert next_compute(rest, costs, load_in_flight=PAGE, compute_in_flight_s=0.05) == 0
    # With a lane idle nothing would call again: then it claims.
    assert next_compute(rest, costs, load_in_flight=PAGE) > 0
    assert next_compute(rest, costs, compute_in_flight_s=0.05) > 0
    slow_link = costs_of(base_s=0.05, tokens_per_s=100)
    assert next_compute(rest, slow_link, load_in_flight=PAGE, compute_in_flight_s=0.05) == rest


def test_without_an_estimate_compute_takes_half_the_gap_up_to_a_chunk() -> None:
    assert next_compute(512, unknown()) == 256
    assert next_compute(8192, unknown()) == 512
    assert next_compute(PAGE, unknown()) == PAGE


def test_a_load_takes_half_a_compute_step() -> None:
    costs = costs_of(base_s=0.0, tokens_per_s=1500)
    assert next_load(16384, costs) == 128
    assert next_load(16384, costs_of(base_s=0.0, tokens_per_s=6000)) == 512


def test_loads_get_shorter_towards_the_meeting() -> None:
    costs = costs_of(base_s=0.0, tokens_per_s=6000)
    gaps = (4096, 1024, 512, 256, 64)
    assert [next_load(gap, costs) for gap in gaps] == [512, 256, 128, 64, 64]


def test_latency_never_dominates_a_load() -> None:
    costs = costs_of(tokens_per_s=6000, latency_s=0.02)
    tokens = next_load(1024, costs)
    assert costs.link.latency_s * 4 <= (tokens + PAGE) / 6000
    assert tokens > 1024 // 4


def test_without_an_estimate_loads_are_a_quarter_of_a_chunk() -> None:
    assert next_load(8192, unknown()) == 128
    assert next_load(256, unknown()) == PAGE


# -- a whole restore, with lanes that aren't what was believed


@dataclass
class Lanes:
    """Both lanes on a virtual clock, claiming as the engine does, forwards one ahead or not."""

    rows_per_s: float
    base_s: float
    tokens_per_s: float
    overlap: bool
    position: int = 0
    computed_s: float = 0.0
    loaded_s: float = 0.0

    def run(self, tokens: int, chunk: int, costs: Costs) -> float:
        gap, claim_at_s, load = tokens, 0.0, 0
        while gap:
            now_s = min(claim_at_s, self.loaded_s)
            if claim_at_s <= self.loaded_s:
                ahead_s = max(0.0, self.computed_s - now_s)
                claim = compute_claim(
                    position=self.position,
                    gap=gap,
                    load_in_flight=round(min(load, (self.loaded_s - now_s) * self.tokens_per_s)),
                    chunk=chunk,
                    page=PAGE,
                    costs=costs,
                    compute_in_flight_s=ahead_s,
                )
                if claim:
                    began_s = max(now_s, self.computed_s)
                    self.computed_s = began_s + self.base_s + claim / self.rows_per_s
                    claim_at_s = began_s + 1e-6 if self.overlap else self.computed_s
                else:
                    claim_at_s = self.computed_s
                self.position += claim
            else:
                claim = load = load_claim(
                    position=self.position, gap=gap, chunk=chunk, page=PAGE, costs=costs
                )
                seconds = claim / self.tokens_per_s
                self.loaded_s += seconds
                costs.link.observe(claim * BYTES_PER_TOKEN, seconds)
            gap -= claim
        return max(self.computed_s, self.loaded_s)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens_per_s", [1500, 3000, 6000])
@pytest.mark.parametrize("believed", [0.25, 1, 4])
def test_the_claims_meet_where_the_link_really_is(
    believed: float, tokens_per_s: float, overlap: bool
) -> None:
    lanes = Lanes(CPU_ROWS_PER_S, 0.010, tokens_per_s, overlap)
    seconds = lanes.run(16384, 512, costs_of(tokens_per_s=tokens_per_s * believed))
    chunks = [(512, 0.010 + 512 / CPU_ROWS_PER_S)] * 32
    bound = meeting_point_bound(chunks, 1 / tokens_per_s)
    assert lanes.position == pytest.approx(bound.token, abs=512)
    assert seconds <= 1.05 * bound.seconds


@pytest.mark.parametrize("tokens_per_s", [20_000, 60_000])
def test_waiting_for_the_loads_saves_a_forward(tokens_per_s: float) -> None:
    """With forwards one ahead it takes no longer than with forwards one by one."""
    times = [
        Lanes(30_000, 0.008, tokens_per_s, overlap).run(
            4096, 8192, costs_of(rows_per_s=30_000, base_s=0.008, tokens_per_s=tokens_per_s)
        )
        for overlap in (False, True)
    ]
    assert times[1] <= 1.02 * times[0]


@pytest.mark.parametrize(
    ("tokens", "gap", "bytes_per_s", "claim"),
    [
        (4096, 4096, None, 2048),
        (4096, 640, None, 640),
        (1024, 1024, None, 512),
        (65536, 65536, 1e12, 32768),
        (65536, 65536, 10_000 * BYTES_PER_TOKEN, 960),
        (65536, 65536, 100 * BYTES_PER_TOKEN, 64),
    ],
)
def test_a_lone_load_takes_half_but_not_for_long(tokens, gap, bytes_per_s, claim):
    costs = Costs(ComputeCost(), LinkCost(), BYTES_PER_TOKEN)
    if bytes_per_s is not None:
        costs.link.observe(10_000_000, 10_000_000 / bytes_per_s)
    span = Span(64, 64 + tokens)
    assert lone_load_claim(span=span, gap=gap, chunk=512, page=PAGE, costs=costs) == claim
