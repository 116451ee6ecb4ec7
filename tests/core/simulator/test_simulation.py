"""Whole simulations: what must hold in any world, and little ones counted by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.bounds import batch_makespan_bound, harmonic_bound
from cacheflow_sgl.core.profiles import Decode
from cacheflow_sgl.core.simulator.beliefs import Beliefs
from cacheflow_sgl.core.simulator.requests import Found, Request, together
from cacheflow_sgl.core.simulator.result import NOBODY, Piece, Result
from cacheflow_sgl.core.simulator.setup import OWN_ENGINE, Boundary, Engine, Setup
from cacheflow_sgl.core.simulator.simulation import Simulation
from cacheflow_sgl.core.simulator.world import Link, World
from cacheflow_sgl.core.staircase import HOLE
from tests.core.simulator.worlds import (
    CHUNK,
    CHUNK_BYTES,
    LAYERS,
    Placed,
    cost,
    link,
    placed,
    world,
)

PAGE = 64
EPSILON = 1e-9


@dataclass(frozen=True)
class Case:
    """All that one simulation is given."""

    world: World
    setup: Setup
    requests: Sequence[Request]
    residency: Placed
    beliefs: tuple[float, float] | None = None
    """Factors by which the seconds of forwards and loads are believed, until learned; None: no
    error."""

    def run(self) -> Result:
        mine = self.world
        beliefs = None
        if self.beliefs:
            compute, links = self.beliefs
            wrong = [Link(each.latency_s, each.bytes_per_s / links) for each in mine.links]
            beliefs = Beliefs.learning(cost(compute), wrong)
        return Simulation(mine, self.setup, self.requests, self.residency, beliefs).run()


# -- worlds of all kinds

TOKENWISE = (Engine.CAKE, Engine.V1)
IN_BATCHES = (
    BatchPolicyName.CAKE,
    BatchPolicyName.FIFO,
    BatchPolicyName.LONGEST,
    BatchPolicyName.CACHEFLOW,
)
ways = st.sampled_from(
    [
        (Engine.RECOMPUTE, BatchPolicyName.RECOMPUTE),
        (Engine.LOAD, BatchPolicyName.LOAD),
        *itertools.product([Engine.CAKE, Engine.V1, Engine.STAIRCASE], IN_BATCHES),
        (Engine.STAIRCASE, BatchPolicyName.CACHEFLOW),
        (Engine.STAIRCASE, BatchPolicyName.CACHEFLOW),
    ]
)
chunk_seconds = st.sampled_from([0.05, 0.5, 0.7, 1.0, 1.3, 9.0])
worlds = st.builds(
    lambda chunk_s, rise, base_s, links, boundary, decode: world(
        cost(chunk_s, rise=rise, base_s=base_s),
        *links,
        boundary_bytes_per_token=boundary,
        decode=decode,
    ),
    chunk_seconds,
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([0.0, 0.05]),
    st.lists(st.builds(link, chunk_seconds, st.sampled_from([0.0, 0.1])), min_size=1, max_size=2),
    st.sampled_from([0, 1, 16]),
    st.sampled_from(
        [Decode(base_s=0.2, per_context_token_s=1e-4), Decode(base_s=1e-3, per_context_token_s=0.0)]
    ),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mine = draw(worlds)
    engine, policy = draw(ways)
    stages = 1 if engine in TOKENWISE else draw(st.sampled_from([1, 1, 2, 4]))
    setup = Setup(
        engine=engine,
        policy=policy,
        stages=stages,
        boundary=draw(st.sampled_from(Boundary)),
        layer_threshold=draw(st.sampled_from([0, 2 * CHUNK])),
        max_queued=draw(st.sampled_from([1, 2, 256])),
        max_running=draw(st.sampled_from([1, 2, 256])),
        decode_steps=draw(st.integers(0, 2)),
        record=True,
    )
    tier_count = 1 if engine in TOKENWISE else len(mine.links)
    places = st.sampled_from([HOLE, *range(tier_count), *range(tier_count)])
    requests, found = [], {}
    for rid in range(draw(st.integers(1, 4))):
        tiers = draw(st.lists(places, max_size=6))
        while tiers and tiers[-1] == HOLE:
            tiers.pop()
        device = CHUNK * draw(st.integers(0, 2))
        found[rid] = Found(device, tuple(tiers))
        prompt = device + CHUNK * len(tiers) + draw(st.sampled_from([1, 40, CHUNK, 3 * CHUNK + 7]))
        after = draw(st.none() | st.integers(0, rid - 1)) if rid else None
        at_s = draw(st.sampled_from([0.0, 0.0, 0.3, 2.0, 7.5]))
        output = draw(st.sampled_from([1, 1, 2, 9]))
        requests.append(Request(rid, at_s, prompt, output, after=after))
    beliefs = draw(st.none() | st.sampled_from([(10.0, 1.0), (0.1, 0.3), (1.0, 20.0)]))
    return Case(mine, setup, requests, Placed(found), beliefs)


# -- what must hold


def pieces(result: Result, lane: str, rid: int, *what: str) -> list[Piece]:
    """In order of their start."""
    mine = [p for p in result.lanes[lane].pieces if p.rid == rid and p.what in what]
    return sorted(mine, key=lambda piece: piece.start_s)


def loads(result: Result, stage: int, rid: int, what: str = "load") -> list[Piece]:
    lanes = [name for name in result.lanes if name.startswith(f"I/O {stage}.")]
    return [piece for lane in lanes for piece in pieces(result, lane, rid, what)]


def tier_bytes(case: Case, result: Result, stage: int, tier: int, rid: int) -> float:
    """Bytes that a link has moved for a request, by the time that it took."""
    mine = case.world.links[tier]
    moved = pieces(result, f"I/O {stage}.{tier}", rid, "load")
    return sum((p.stop_s - p.start_s - mine.latency_s) * mine.bytes_per_s for p in moved)


def wanted(case: Case, rid: int) -> tuple[int, ...]:
    """Tiers of the chunks that the engine brings back before the suffix."""
    tiers = case.residency.found[rid].tiers
    if case.setup.engine is Engine.RECOMPUTE:
        return ()
    if case.setup.engine is Engine.LOAD:
        return tuple(itertools.takewhile(lambda tier: tier != HOLE, tiers))
    return tiers


def check_lanes(result: Result) -> None:
    for lane in result.lanes.values():
        ordered = sorted(lane.pieces, key=lambda piece: (piece.start_s, piece.stop_s))
        for before, piece in itertools.pairwise(ordered):
            assert before.stop_s <= piece.start_s + EPSILON, "a lane does one piece at a time"
        assert lane.busy_s == pytest.approx(sum(p.stop_s - p.start_s for p in ordered))
        assert all(piece.stop_s <= result.end_s + EPSILON for piece in ordered)


def check_arrivals(case: Case, result: Result) -> None:
    served = {each.rid: each for each in result.served}
    for request in case.requests:
        before = 0.0 if request.after is None else served[request.after].done_s
        assert served[request.rid].arrived_s == pytest.approx(before + request.at_s)
    for lane in result.lanes.values():
        for piece in lane.pieces:
            if piece.rid != NOBODY:
                assert piece.start_s >= served[piece.rid].arrived_s - EPSILON


def check_cells(case: Case, result: Result, rid: int) -> None:
    """Every cell of the prefix is computed or loaded once, and after its inputs."""
    layers = LAYERS // case.setup.stages
    start = case.residency.found[rid].device_tokens
    tiers = wanted(case, rid)
    for stage in range(case.setup.stages):
        computed: Counter[int] = Counter()
        landing = loads(result, stage, rid)
        for piece in pieces(result, f"compute {stage}", rid, "prefix"):
            for page in range(start, piece.span.start, PAGE):
                there = computed[page] + sum(
                    load.layers
                    for load in landing
                    if load.span.start <= page < load.span.stop
                    and load.stop_s <= piece.start_s + EPSILON
                )
                assert computed[page] >= piece.layers or there == layers, "an input is missing"
            for page in range(piece.span.start, piece.span.stop, PAGE):
                assert not computed[page], "computed twice"
                computed[page] = piece.layers
        for tier in range(len(case.world.links)):
            pages = [
                start + j * CHUNK + page
                for j in range(len(tiers))
                if tiers[j] == tier
                for page in range(0, CHUNK, PAGE)
            ]
            rest = sum(layers - computed[page] for page in pages) * PAGE * 8
            assert tier_bytes(case, result, stage, tier, rid) == pytest.approx(rest, abs=0.01)
        for j, tier in enumerate(tiers):
            at = start + j * CHUNK
            if tier == HOLE:
                assert computed[at] == computed[at + PAGE] == layers, "a hole is computed"
            if case.setup.engine is Engine.LOAD:
                assert not computed[at], "what can be loaded was computed"
    total = sum(
        tier_bytes(case, result, *where, rid)
        for where in itertools.product(range(case.setup.stages), range(len(case.world.links)))
    )
    served = next(each for each in result.served if each.rid == rid)
    assert served.loaded_bytes == pytest.approx(total, abs=0.01)


def check_suffix(case: Case, result: Result, rid: int) -> None:
    """In order, once, after all that it needs; the first token comes with its end."""
    request = next(each for each in case.requests if each.rid == rid)
    layers = LAYERS // case.setup.stages
    start = case.residency.found[rid].device_tokens + CHUNK * len(wanted(case, rid))
    before: dict[int, float] = {}
    for stage in range(case.setup.stages):
        suffix = pieces(result, f"compute {stage}", rid, "suffix")
        edges = [start, *(piece.span.stop for piece in suffix)]
        assert [piece.span.start for piece in suffix] == edges[:-1]
        assert edges[-1] == request.prompt_tokens
        assert all(piece.span.tokens <= CHUNK and piece.layers == layers for piece in suffix)
        for piece in pieces(result, f"compute {stage}", rid, "prefix"):
            assert piece.stop_s <= suffix[0].start_s + EPSILON
        layer_s = (suffix[0].stop_s - suffix[0].start_s) / layers
        for load in loads(result, stage, rid):
            assert suffix[0].stop_s >= load.stop_s + layer_s - EPSILON, "a layer was not there"
        for piece in suffix:
            for token, stop_s in before.items():
                if token < piece.span.stop:
                    assert piece.start_s >= stop_s - EPSILON, "overtook the stage before"
        before = {piece.span.start: piece.stop_s for piece in suffix}
    served = next(each for each in result.served if each.rid == rid)
    assert served.first_token_s == pytest.approx(max(before.values()))


def check_stages(case: Case, result: Result, rid: int) -> None:
    """What a later stage computes a prefix from is there."""
    for stage in range(1, case.setup.stages):
        mine = pieces(result, f"compute {stage}", rid, "prefix")
        upstream = pieces(result, f"compute {stage - 1}", rid, "prefix")
        if case.setup.boundary is Boundary.OFF_SERIAL:
            done_s = max((p.stop_s for p in [*upstream, *loads(result, stage - 1, rid)]), default=0)
            work = [*mine, *loads(result, stage, rid)]
            assert all(piece.start_s >= done_s - EPSILON for piece in work)
            continue
        if case.setup.boundary is Boundary.OFF:
            inputs = [p for p in upstream if p.layers == LAYERS // case.setup.stages]
        elif case.world.boundary_bytes_per_token:
            inputs = loads(result, stage, rid, "boundary")
        else:
            continue
        for piece in mine:
            stops = [each.stop_s for each in inputs if each.span == piece.span]
            assert len(stops) == 1, "one input a chunk"
            assert stops[0] <= piece.start_s + EPSILON


def bound_s(case: Case) -> float:
    """No server can have given all their first tokens sooner after the first has come."""
    compute, load, tier, suffix_s = [], [], [], 0.0
    layers = LAYERS // case.setup.stages
    for request in case.requests:
        found = case.residency.found[request.rid]
        stop = found.device_tokens + CHUNK * len(found.tiers)
        suffix_s += case.world.compute.span_s(stop, request.prompt_tokens, CHUNK, layers)
        for j, place in enumerate(found.tiers):
            at = found.device_tokens + j * CHUNK
            compute.append(case.world.compute.seconds(at, CHUNK, layers))
            rate = case.world.links[place].bytes_per_s
            load.append(math.inf if place == HOLE else CHUNK_BYTES / case.setup.stages / rate)
            tier.append(place)
    return batch_makespan_bound(compute, load, tier, suffix_s)


@pytest.mark.timeout(120)
@settings(deadline=None, max_examples=100)
@given(cases())
def test_all_are_served_and_every_cell_comes_once_after_its_inputs(case: Case) -> None:
    result = case.run()
    assert [each.rid for each in result.served] == [each.rid for each in case.requests]
    check_lanes(result)
    check_arrivals(case, result)
    for request in case.requests:
        check_cells(case, result, request.rid)
        check_suffix(case, result, request.rid)
        check_stages(case, result, request.rid)
    first = min(each.arrived_s for each in result.served)
    last = max(each.first_token_s for each in result.served)
    assert last - first >= bound_s(case) - EPSILON


def all_served(case: Case) -> Result:
    result = case.run()
    assert [each.rid for each in result.served] == [each.rid for each in case.requests]
    return result


# -- who was once never served


@pytest.mark.parametrize("engine", [Engine.V1, Engine.CAKE, Engine.STAIRCASE])
def test_a_hole_before_a_load_that_is_fast_is_computed(engine: Engine) -> None:
    fast = world(cost(), link(0.05))
    case = Case(fast, Setup(engine, record=True), together([257]), placed((HOLE, 0)))
    result = all_served(case)
    check_cells(case, result, 0)
    assert 1.0 <= result.mean_ttft_s <= 1.1  # the hole, then a suffix of one token


def test_a_later_stage_waits_for_a_hole_that_the_stage_before_has_not_done() -> None:
    fast, setup = world(cost(), link(0.05)), Setup(stages=2, boundary=Boundary.OFF)
    all_served(Case(fast, setup, together([257]), placed((HOLE, 0))))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_those_that_run_go_on_while_others_wait_for_their_place(stages: int) -> None:
    setup = Setup(stages=stages, policy=BatchPolicyName.FIFO, max_running=1)
    mine = world(cost(), link(0.05))
    all_served(Case(mine, setup, together([1, 257]), placed((), (HOLE, 0))))


# -- counted by hand: a chunk takes 1 s to compute, a layer of a suffix of one chunk 0.25 s


def one(
    engine: Engine,
    mine: World,
    tiers: tuple[int, ...],
    suffix: int = CHUNK,
    **setup: Any,
) -> Result:
    """One request alone."""
    policy = {engine: name for name, engine in OWN_ENGINE.items()}.get(
        engine, BatchPolicyName.CACHEFLOW
    )
    prompt = CHUNK * len(tiers) + suffix
    full = Setup(engine, policy, record=True, **setup)
    return all_served(Case(mine, full, together([prompt]), placed(tiers)))


def test_a_request_is_done_once_though_its_loads_end_together() -> None:
    slow = world(cost(0.05), Link(0.0, 8192.0), Link(0.0, 8192.0), boundary_bytes_per_token=16)
    setup = Setup(policy=BatchPolicyName.CAKE, stages=4)
    requests = [Request(0, 0.0, 2 * CHUNK + 1)]
    result = Simulation(slow, setup, requests, placed((1, 0))).run()
    assert [served.rid for served in result.served] == [0]


def test_recompute_is_the_sum_of_its_chunks() -> None:
    assert one(Engine.RECOMPUTE, world(), (0,) * 4).mean_ttft_s == 5.0
    rising = world(cost(1.0, rise=1.0, base_s=0.5))  # 1.5, 2.5, 3.5, and half of 4 + 0.5
    assert one(Engine.RECOMPUTE, rising, (0,) * 3, 64).mean_ttft_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("load_s", "ttft_s"),
    [
        (1.0, 4.25),  # slower than the suffix, which may have only its last layer left at 4 s
        (0.25, 1.25),  # as fast: the first layer is there at 0.25 s
        (0.125, 1.125),  # faster: the suffix starts when its first layer is there
    ],
)
def test_a_load_alone_takes_the_longer_of_load_and_suffix(load_s: float, ttft_s: float) -> None:
    result = one(Engine.LOAD, world(cost(), link(load_s)), (0,) * 4)
    assert result.mean_ttft_s == pytest.approx(ttft_s)
    assert result.lanes["I/O 0.0"].busy_s == pytest.approx(4 * load_s)
    assert result.served[0].restored_s == pytest.approx(4 * load_s)


def test_a_load_from_two_tiers_is_as_long_as_its_longer_part() -> None:
    mine = world(cost(), link(0.5), link(2.0))
    result = one(Engine.LOAD, mine, (0, 0, 1, 1, 0))
    assert result.mean_ttft_s == pytest.approx(4.25)
    assert result.served[0].loaded_bytes == 5 * CHUNK_BYTES


def test_latency_comes_once_a_load() -> None:
    mine = world(cost(), link(1.0, latency_s=0.5))
    assert one(Engine.LOAD, mine, (0,) * 4).mean_ttft_s == pytest.approx(4.75)


def test_load_stops_at_the_first_hole() -> None:
    result = one(Engine.LOAD, world(cost(), link(0.25)), (0, HOLE, 0))
    assert result.mean_ttft_s == pytest.approx(0.0625 + 3)
    assert result.served[0].loaded_bytes == CHUNK_BYTES


def test_cake_of_equal_rates_meets_in_the_middle() -> None:
    result = one(Engine.CAKE, world(), (0,) * 8)
    assert result.mean_ttft_s == harmonic_bound(8.0, 8.0) + 1
    assert result.served[0].loaded_bytes == 4 * CHUNK_BYTES


def test_a_staircase_of_equal_rates_is_near_the_least_that_both_lanes_need() -> None:
    """C chunks computed and a suffix of 1 s on one lane, the others on the other: 4.5 s each."""
    ttft_s = one(Engine.STAIRCASE, world(), (0,) * 8).mean_ttft_s
    assert 4.5 <= ttft_s <= 1.06 * 4.5


@pytest.mark.parametrize(
    ("engine", "load_s", "ttft_s"),
    [
        (Engine.STAIRCASE, 0.01, 2.01),  # the chunk before it is loaded
        (Engine.STAIRCASE, 200.0, 4.0),  # all is computed
        (Engine.CAKE, 0.01, 3.0),  # computes a chunk, come what may
        (Engine.CAKE, 200.0, 201.0),  # and loads one
        (Engine.V1, 0.01, 3.0),  # its least claim of two pages is a chunk
        (Engine.V1, 200.0, 4.0),
    ],
)
def test_a_hole_in_the_middle(engine: Engine, load_s: float, ttft_s: float) -> None:
    result = one(engine, world(cost(), link(load_s)), (0, HOLE, 0))
    assert result.mean_ttft_s == pytest.approx(ttft_s)


def stages_ttft_s(engine: Engine, boundary: Boundary, chunks: int = 16) -> float:
    """Two stages whose links load a chunk of all layers in 1 s: their half takes 0.5 s."""
    return one(engine, world(), (0,) * chunks, stages=2, boundary=boundary).mean_ttft_s


def test_two_stages_share_the_work() -> None:
    # Both load 8 s at once; the last of two layers of 0.25 s is left; then the second stage.
    assert stages_ttft_s(Engine.LOAD, Boundary.EXACT) == pytest.approx(8 + 0.25 + 0.5)
    # One after the other.
    serial = stages_ttft_s(Engine.LOAD, Boundary.OFF_SERIAL)
    assert 16 + 0.25 <= serial <= 16 + 0.5
    # Chunks flow: each stage has 17 of 0.5 s, the second starts with the second.
    assert stages_ttft_s(Engine.RECOMPUTE, Boundary.EXACT) == pytest.approx(9.0)


def test_stages_that_restore_by_themselves_take_half_of_those_that_wait() -> None:
    exact = stages_ttft_s(Engine.STAIRCASE, Boundary.EXACT, 32)
    serial = stages_ttft_s(Engine.STAIRCASE, Boundary.OFF_SERIAL, 32)
    flowing = stages_ttft_s(Engine.STAIRCASE, Boundary.OFF, 32)
    assert 8.0 <= exact <= 1.06 * 8 + 1
    assert 16.0 <= serial <= 1.06 * 16 + 1
    assert exact <= flowing <= serial


def test_the_bytes_of_boundaries_are_loaded_but_no_kv() -> None:
    mine = world(cost(), link(), boundary_bytes_per_token=4)
    result = one(Engine.STAIRCASE, mine, (0,) * 8, stages=2)
    boundaries = loads(result, 1, 0, "boundary")
    assert boundaries and not loads(result, 0, 0, "boundary")
    assert all(p.stop_s - p.start_s == pytest.approx(CHUNK * 4 / CHUNK_BYTES) for p in boundaries)
    kv = sum(p.stop_s - p.start_s for stage in (0, 1) for p in loads(result, stage, 0))
    assert result.served[0].loaded_bytes == pytest.approx(kv * CHUNK_BYTES)


STEPS = world(decode=Decode(base_s=0.5, per_context_token_s=0.0))
RECOMPUTE = Setup(Engine.RECOMPUTE, BatchPolicyName.RECOMPUTE, record=True)


def served_by(setup: Setup, *requests: Request, mine: World = STEPS) -> list[tuple[float, float]]:
    """First and last token of requests without a prefix."""
    result = all_served(Case(mine, setup, requests, placed(*[()] * len(requests))))
    return [(each.first_token_s, each.done_s) for each in result.served]


def test_a_request_decodes_all_tokens_but_its_first() -> None:
    assert served_by(RECOMPUTE, Request(0, 2.0, CHUNK, 5)) == [(3.0, 5.0)]
    assert served_by(RECOMPUTE, Request(0, 2.0, CHUNK, 1)) == [(3.0, 3.0)]


def test_an_arrival_is_prefilled_after_the_step_that_runs() -> None:
    early, late = Request(0, 0.0, CHUNK, 5), Request(1, 1.2, CHUNK, 2)
    # Step until 1.5, prefill until 2.5, then both; three steps are left for the first.
    assert served_by(RECOMPUTE, early, late) == [(1.0, 4.0), (2.5, 3.0)]


def test_steps_between_the_forwards_of_a_prefill() -> None:
    early, late = Request(0, 0.0, CHUNK, 5), Request(1, 1.0, 2 * CHUNK)
    assert served_by(RECOMPUTE, early, late) == [(1.0, 5.0), (3.0, 3.0)]
    between = replace(RECOMPUTE, decode_steps=1)
    assert served_by(between, early, late) == [(1.0, 5.0), (4.0, 4.0)]


def test_a_step_costs_by_its_context() -> None:
    mine = world(decode=Decode(base_s=0.5, per_context_token_s=1 / CHUNK))
    # Two steps at once count the context as it is at the start.
    assert served_by(RECOMPUTE, Request(0, 0.0, CHUNK, 3), mine=mine) == [(1.0, 4.0)]


def test_a_request_waits_for_its_place_among_those_that_run() -> None:
    early, late = Request(0, 0.0, CHUNK, 3), Request(1, 0.0, CHUNK)
    assert served_by(RECOMPUTE, early, late) == [(1.0, 3.0), (2.0, 2.0)]
    alone = replace(RECOMPUTE, max_running=1)
    assert served_by(alone, early, late) == [(1.0, 2.0), (3.0, 3.0)]


def test_a_restore_waits_for_its_place_in_the_queue() -> None:
    setup = Setup(Engine.LOAD, BatchPolicyName.LOAD)
    two = together([5 * CHUNK, 5 * CHUNK])
    both = all_served(Case(world(), setup, two, placed((0,) * 4, (0,) * 4)))
    assert [each.first_token_s for each in both.served] == pytest.approx([4.25, 8.25])
    queue = Case(world(), replace(setup, max_queued=1), two, placed((0,) * 4, (0,) * 4))
    one_by_one = all_served(queue)
    assert [each.first_token_s for each in one_by_one.served] == pytest.approx([4.25, 8.5])


def test_a_restore_goes_on_while_its_request_waits_for_a_place() -> None:
    setup = Setup(Engine.LOAD, BatchPolicyName.LOAD, max_running=1, record=True)
    requests = [Request(0, 0.0, CHUNK, 9), Request(1, 0.0, 3 * CHUNK)]
    result = all_served(Case(STEPS, setup, requests, placed((), (0, 0))))
    assert result.served[0].done_s == 5.0
    assert result.served[1].restored_s == 2.0
    assert result.served[1].first_token_s == 6.0


def test_a_closed_loop_starts_when_the_one_before_is_done() -> None:
    requests = [Request(0, 1.0, CHUNK, 3), Request(1, 0.5, CHUNK, after=0)]
    assert served_by(RECOMPUTE, *requests) == [(2.0, 3.0), (4.5, 4.5)]


def test_what_lies_on_the_device_is_there() -> None:
    residency = Placed({0: Found(2 * CHUNK, (0,))})
    mine = world(cost(), link(0.25))
    setup = Setup(Engine.LOAD, BatchPolicyName.LOAD)
    result = all_served(Case(mine, setup, together([4 * CHUNK]), residency))
    assert result.served[0].device_tokens == 2 * CHUNK
    assert result.mean_ttft_s == pytest.approx(0.0625 + 1)


def test_progress_is_told_now_and_then() -> None:
    told: list[int] = []
    requests = together([1] * 250)
    Simulation(world(), RECOMPUTE, requests, placed(*[()] * 250)).run(told.append)
    assert told == [100, 200, 250]


def test_layers_are_shared_equally_or_not_at_all() -> None:
    with pytest.raises(ValueError, match="4 layers can't be cut in 3 stages"):
        Simulation(world(), Setup(stages=3), [], placed())


@pytest.mark.timeout(120)
@settings(deadline=None, max_examples=25)
@given(cases())
def test_the_same_again(case: Case) -> None:
    first, again = case.run(), case.run()
    assert first.served == again.served
    assert first.lanes == again.lanes


# -- beliefs


def one_by_one(beliefs: Beliefs | None) -> Result:
    """Twelve requests, none before the last is done, with 12 chunks of a prefix each."""
    requests = [Request(rid, 1.0, 13 * CHUNK, after=rid - 1 if rid else None) for rid in range(12)]
    residency = placed(*[(0,) * 12] * 12)
    return Simulation(world(), Setup(), requests, residency, beliefs).run()


@pytest.mark.parametrize(("compute", "load"), [(8.0, 1.0), (1.0, 8.0), (0.2, 1.0), (1.0, 0.2)])
def test_wrong_beliefs_cost_time_until_they_are_corrected(compute: float, load: float) -> None:
    right = one_by_one(None)
    wrong = [link(load)]
    fixed = one_by_one(Beliefs(cost(compute), Beliefs.learning(cost(), wrong).links))
    learned = one_by_one(Beliefs.learning(cost(compute), wrong))
    assert fixed.ttft_s[-1] == pytest.approx(fixed.ttft_s[0])
    assert fixed.ttft_s[-1] > 1.02 * right.ttft_s[-1]
    assert learned.ttft_s[-1] < 1.02 * right.ttft_s[-1]
