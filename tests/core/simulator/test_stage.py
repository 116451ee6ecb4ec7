"""When a suffix may follow its loads through the layers; lanes that are late or early."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.simulator.beliefs import Beliefs
from cacheflow_sgl.core.simulator.jobs import Job, Landing, Progress
from cacheflow_sgl.core.simulator.requests import Request, together
from cacheflow_sgl.core.simulator.result import Served
from cacheflow_sgl.core.simulator.setup import Engine, Setup
from cacheflow_sgl.core.simulator.simulation import Simulation
from tests.core.simulator.worlds import CHUNK, LAYERS, cost, link, placed, world


@settings(deadline=None)
@given(
    st.floats(0, 10),
    st.floats(0, 10),
    st.lists(st.integers(0, 8), min_size=2, max_size=2, unique=True).map(sorted),
    st.floats(0, 20),
)
@example(1.0, 4.0, [0, 4], 1.0)  # a slow load holds its last layer
@example(1.0, 1.0, [2, 8], 8.0)  # a fast one its first
def test_a_suffix_starts_as_early_as_every_layer_allows(
    start_s: float, seconds: float, ends: list[int], suffix_s: float
) -> None:
    first, stop = ends
    landing = Landing(start_s, start_s + seconds, first, stop)
    earliest_s = landing.earliest_s(suffix_s, 8)
    slack = [
        earliest_s
        + layer * suffix_s / 8
        - (start_s + seconds * (layer - first + 1) / (stop - first))
        for layer in range(first, stop)
    ]
    assert min(slack) == pytest.approx(0, abs=1e-9)


def test_an_input_holds_the_suffix_until_it_is_there() -> None:
    assert Landing(1.0, 3.0, 0, 0).earliest_s(8.0, 8) == 3.0


def job(*stages: tuple[int, float], prompt: int = 1000) -> Job:
    """Stages with so many tokens prefilled, and when their suffixes may start."""
    request = Request(0, 0.0, prompt)
    progress = [Progress(None, at, from_s) for at, from_s in stages]
    return Job(request, Served(0, 0.0, prompt, 1), progress)


def test_a_suffix_goes_on_in_chunks_up_to_the_end_of_the_prompt() -> None:
    assert job((0, 0.0)).next_suffix(0, 512) == Span(0, 512)
    assert job((900, 0.0)).next_suffix(0, 512) == Span(900, 1000)
    assert job((1000, 0.0)).next_suffix(0, 512) is None


def test_a_later_stage_gets_what_the_one_before_has_done() -> None:
    assert job((700, 0.0), (500, 0.0)).next_suffix(1, 512) == Span(500, 700)
    assert job((700, 0.0), (100, 0.0)).next_suffix(1, 512) == Span(100, 612)
    assert job((700, 0.0), (700, 0.0)).next_suffix(1, 512) is None
    assert job((700, math.inf), (500, 0.0)).next_suffix(1, 512) is None, "its prefix isn't back"


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 6),
    st.sampled_from([0.05, 0.2, 0.25, 0.3, 1.0]),
    st.sampled_from([1, 64, CHUNK, 200]),
    st.sampled_from([0.0, 0.5]),
)
def test_a_load_alone_by_the_definition(
    chunks: int, load_s: float, suffix: int, latency_s: float
) -> None:
    """Layer after layer: it has landed, and the one before is done."""
    mine = world(cost(), link(load_s, latency_s))
    setup = Setup(Engine.LOAD, BatchPolicyName.LOAD)
    requests = together([chunks * CHUNK + suffix])
    result = Simulation(mine, setup, requests, placed((0,) * chunks)).run()
    first, *rest = [CHUNK] * (suffix // CHUNK) + [suffix % CHUNK] * (suffix % CHUNK > 0)
    assume(suffix)
    end_s, whole_s = 0.0, latency_s + chunks * load_s
    for layer in range(LAYERS):
        landed_s = whole_s * (layer + 1) / LAYERS
        end_s = max(end_s, landed_s) + first / CHUNK / LAYERS
    # Held at its last layer a suffix runs through without a pause, so it is as late, no later.
    assert result.mean_ttft_s == pytest.approx(end_s + sum(rest) / CHUNK)


@pytest.mark.parametrize(("chunks", "load_s"), [(1, 1.3), (2, 0.7), (3, 1.3), (9, 1.0)])
def test_the_last_loads_wait_for_the_one_in_flight(chunks: int, load_s: float) -> None:
    requests = together([(chunks + 1) * CHUNK])
    mine = world(cost(), link(load_s))
    result = Simulation(mine, Setup(record=True), requests, placed((0,) * chunks)).run()
    loads = result.lanes["I/O 0.0"].pieces
    assert len(loads) > 1
    assert all(a.stop_s <= b.start_s for a, b in itertools.pairwise(loads))


def test_a_link_that_is_slower_than_believed_is_waited_for() -> None:
    mine = world(cost(), link(4.0))
    beliefs = Beliefs(mine.compute, Beliefs.exact(world()).links)
    result = Simulation(mine, Setup(record=True), together([9 * CHUNK]), placed((0,) * 8), beliefs)
    lanes = result.run().lanes
    loads = lanes["I/O 0.0"].pieces
    assert all(a.stop_s <= b.start_s for a, b in itertools.pairwise(loads))
    suffix = lanes["compute 0"].pieces[-1]
    assert suffix.what == "suffix"
    assert suffix.stop_s >= max(load.stop_s for load in loads) + 0.25


def test_busy_seconds_are_kept_without_pieces() -> None:
    result = Simulation(world(), Setup(), together([9 * CHUNK]), placed((0,) * 8)).run()
    kept = Simulation(world(), Setup(record=True), together([9 * CHUNK]), placed((0,) * 8)).run()
    assert list(result.lanes) == ["compute 0", "I/O 0.0"]
    for name, lane in result.lanes.items():
        assert not lane.pieces
        assert lane.busy_s == kept.lanes[name].busy_s > 0
