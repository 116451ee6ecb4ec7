"""The staircase engine: pieces in any order, and what is left in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.simulator.beliefs import Beliefs
from cacheflow_sgl.core.simulator.restores import Plot
from cacheflow_sgl.core.simulator.staircase_restore import staircase_restore
from cacheflow_sgl.core.staircase import HOLE
from tests.core.simulator.restoring import NOW, Lanes, plot, walk
from tests.core.simulator.worlds import CELL_BYTES, CHUNK, CHUNK_BYTES, LAYERS, cost, link, world

places = st.lists(st.sampled_from([0, 0, 1, HOLE]), max_size=6).map(lambda tiers: (*tiers, 0))
seconds = st.sampled_from([0.05, 0.3, 1.0, 4.0])
plots = st.builds(
    lambda tiers, near, far, latency_s, boundary, suffix: plot(
        world(cost(rise=0.1), link(near, latency_s), link(far, latency_s)),
        *tiers,
        boundary=boundary,
        suffix=suffix,
    ),
    places,
    seconds,
    seconds,
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0, 4]),
    st.sampled_from([0, 1, CHUNK]),
)


@settings(deadline=None)
@given(plots, st.data())
def test_every_cell_comes_once_in_any_order(mine: Plot, data: st.DataObject) -> None:
    lanes = Lanes(staircase_restore(mine))
    walk(lanes, data)
    assert not [load for load in lanes.loads if load.what == "load" and load.tier < 0]
    computed = {forward.span: forward.layers for forward in lanes.forwards}
    assert len(computed) == len(lanes.forwards), "a chunk computed twice"
    rest: Counter[int] = Counter()
    for chunk, tier in zip(mine.chunks, mine.tiers, strict=True):
        if tier == HOLE:
            assert computed[chunk] == LAYERS
        else:
            rest[tier] += (LAYERS - computed.get(chunk, 0)) * CELL_BYTES
    assert lanes.loaded_bytes() == +rest
    assert lanes.restore.load_left_s == 0.0
    assert lanes.restore.compute_left_s == pytest.approx(0.0, abs=1e-9)
    for number, chunk in enumerate(mine.chunks):
        assert lanes.restore.computed(number) == (computed.get(chunk) == LAYERS)
    inputs = [load for load in lanes.loads if load.what == "boundary"]
    assert len({load.span for load in inputs}) == len(inputs)
    if mine.boundary_bytes_per_token:
        assert {*computed} <= {load.span for load in inputs}
        assert all(load.nbytes == CHUNK * 4 for load in inputs)


@settings(deadline=None)
@given(plots, st.data())
def test_what_is_left_is_what_nobody_has_claimed(mine: Plot, data: st.DataObject) -> None:
    lanes = Lanes(staircase_restore(mine))
    for _ in range(data.draw(st.integers(0, 12))):
        if lanes.restore.complete or lanes.restore.closing:
            break
        data.draw(st.sampled_from([lanes.compute, lanes.load, lanes.end_first]))()
    if lanes.restore.closing:
        return  # the last loads are claimed at once
    left: Counter[int] = Counter()
    for tier, chunk in zip(mine.tiers, mine.chunks, strict=True):
        left[tier] += CHUNK_BYTES * (tier != HOLE)
        for forward in lanes.forwards:
            if forward.span == chunk and tier != HOLE:
                left[tier] -= forward.layers * CELL_BYTES
    left.subtract(lanes.loaded_bytes())
    links = mine.beliefs.links
    expected_s = max(left[tier] / links[tier].bytes_per_s for tier in (0, 1))
    assert lanes.restore.load_left_s == pytest.approx(expected_s, abs=1e-9)


def test_nothing_is_left_to_load_once_all_is_claimed_whatever_was_learned() -> None:
    """Or a batch that lets nobody compute before their loads would wait for a rest for good."""
    mine = world()
    beliefs = Beliefs.learning(mine.compute, mine.links)
    restore = staircase_restore(plot(mine, HOLE, 0, 0, beliefs=beliefs))
    lanes = Lanes(restore)
    assert restore.load_left_s == pytest.approx(2.0)
    assert restore.step_load_s == 0.0, "the next step is a hole"
    lanes.load()
    for _ in range(20):
        beliefs.observe_load(0, CHUNK_BYTES, 0.3)
    while lanes.load():
        pass
    assert not restore.closing
    assert restore.load_left_s == 0.0
    assert lanes.compute() is not None


def test_what_is_left_to_load_follows_what_is_learned() -> None:
    mine = world()
    beliefs = Beliefs.learning(mine.compute, mine.links)
    restore = staircase_restore(plot(mine, 0, 0, beliefs=beliefs))
    for _ in range(20):
        beliefs.observe_load(0, CHUNK_BYTES, 0.5)
    assert restore.load_left_s == pytest.approx(1.0, rel=0.05)


def test_load_only_asks_for_one_load_a_tier_and_no_compute() -> None:
    mine = plot(world(cost(), link(1.0), link(2.0)), 0, 0, 1)
    lanes = Lanes(staircase_restore(mine, load_only=True))
    restore = lanes.restore
    assert restore.closing and not restore.all_claimed
    assert restore.compute_left_s == restore.step_load_s == 0.0
    assert restore.load_left_s == pytest.approx(2.0), "no link has it yet"
    # The suffix of 1 s may be 3 of 4 layers ahead of its last load, 2 s; or of one that waits 2 s.
    assert restore.follows_in(NOW) == pytest.approx(2.0 - 0.75)
    assert restore.follows_in((2.0, 0.0)) == pytest.approx(4.0 - 0.75)
    loads = [lanes.load(), lanes.load()]
    assert [load and (load.tier, load.span, load.nbytes) for load in loads] == [
        (0, Span(0, 2 * CHUNK), 2 * CHUNK_BYTES),
        (1, Span(2 * CHUNK, 3 * CHUNK), CHUNK_BYTES),
    ]
    assert all(load and (load.first_layer, load.stop_layer) == (0, LAYERS) for load in loads)
    assert restore.all_claimed and restore.load_tiers == ()
    assert restore.next_load(0, 0.0) is None
    assert restore.follows_in((3.0, 1.0)) == pytest.approx(3.0 - 0.75)
    lanes.end()
    assert not restore.complete
    lanes.end()
    assert restore.complete


def test_a_step_is_that_of_the_next_forward() -> None:
    restore = staircase_restore(plot(world(cost(rise=1.0), link(0.5)), 0, 0, 0))
    assert (restore.step_s, restore.step_load_s) == (1.0, 0.5)


def test_a_slow_link_gets_nothing_that_compute_would_overtake() -> None:
    restore = staircase_restore(plot(world(cost(), link(50.0)), 0, 0, 0))
    lanes = Lanes(restore)
    assert lanes.compute() is not None
    assert lanes.load(step_left_s=1.0) is None
    assert lanes.restore.load_tiers == (0,)


def test_links_load_at_once_each_from_its_own_tail() -> None:
    restore = staircase_restore(plot(world(cost(), link(), link()), 0, 0, 0, 1, 1))
    assert restore.load_tiers == (0, 1)
    front, tail = restore.next_load(0, 0.0), restore.next_load(1, 0.0)
    assert front is not None and front.span == Span(2 * CHUNK, 3 * CHUNK)
    assert tail is not None and tail.span == Span(4 * CHUNK, 5 * CHUNK)


def test_nothing_is_loaded_that_chains_compute_to_a_slower_link() -> None:
    restore = staircase_restore(plot(world(cost(), link(), link(50.0)), 0, 0, 0, 1))
    assert restore.next_load(0, 0.0) is None
    assert restore.load_tiers == (0, 1), "it may be in time later"
    # 3 s of compute before the last chunk of tier 0, 6 s of loads behind it: half a half of it.
    restore = staircase_restore(plot(world(cost(), link(), link(2.0)), 0, 0, 0, 0, 1, 1, 1))
    load = restore.next_load(0, 0.0)
    assert load is not None and (load.span.start, load.first_layer) == (3 * CHUNK, 3)
    assert restore.next_load(0, 0.0) is None


def test_behind_a_hole_nothing_is_chained() -> None:
    restore = staircase_restore(plot(world(cost(), link(), link(50.0)), 0, HOLE, 0, 1, 0))
    load = restore.next_load(0, 0.0)
    assert load is not None and load.span == Span(0, CHUNK)


def test_it_closes_where_compute_can_not_pass_what_was_loaded() -> None:
    mine = plot(world(cost(), link(0.4), link(2.0)), 1, 1, 1, 1, 0)
    lanes = Lanes(staircase_restore(mine))
    while (load := lanes.restore.next_load(1, 0.0)) is not None and load.span.start > 2 * CHUNK:
        pass
    layers = [forward.layers for forward in (lanes.compute(), lanes.compute(), lanes.compute())]
    assert layers[:2] == [LAYERS, LAYERS]
    assert lanes.compute() is None
    assert not lanes.restore.closing
    last = lanes.restore.next_load(0, 0.0)
    assert last is not None and (last.span, last.first_layer) == (mine.chunks[4], 0)
    assert lanes.restore.closing


def test_a_fast_link_closes_before_anything_is_computed() -> None:
    restore = staircase_restore(plot(world(cost(), link(0.01)), 0, 0, 0))
    lanes = Lanes(restore)
    load = lanes.load()
    assert restore.closing and restore.all_claimed
    assert load is not None and load.nbytes == 3 * CHUNK_BYTES
    assert not restore.computed(0)


def test_compute_waits_for_its_input_which_is_loaded_one_ahead() -> None:
    lanes = Lanes(staircase_restore(plot(world(cost(), link(4.0)), 0, 0, 0, boundary=4)))
    assert lanes.compute() is None
    first, second, third = lanes.load(), lanes.load(), lanes.load()
    assert [each and each.what for each in (first, second, third)] == [
        "boundary",
        "boundary",
        "load",
    ]
    assert first and (first.span, first.nbytes) == (Span(0, CHUNK), CHUNK * 4)
    assert second and second.span == Span(CHUNK, 2 * CHUNK)
    lanes.end()
    forward = lanes.compute()
    assert forward is not None and forward.span == Span(0, CHUNK)
    assert lanes.compute() is None, "the input of the second isn't there"


def test_a_stage_behind_another_waits_for_what_that_computes() -> None:
    slow = plot(world(cost(), link(40.0)), 0, 0, 0)
    before = Lanes(staircase_restore(slow))
    behind = Lanes(staircase_restore(slow, upstream=before.restore))
    assert behind.compute() is None
    before.compute()
    assert behind.compute() is None, "it has not ended"
    before.end()
    forward = behind.compute()
    assert forward is not None and (forward.span, forward.layers) == (Span(0, CHUNK), LAYERS)


def test_a_stage_behind_one_that_only_loads_can_only_load() -> None:
    slow = plot(world(cost(), link(40.0)), 0, 0)
    before = staircase_restore(slow, load_only=True)
    behind = staircase_restore(slow, upstream=before)
    assert behind.next_forward(NOW) is None
    assert behind.closing


def test_a_stage_behind_one_that_closes_still_computes_its_holes() -> None:
    fast = plot(world(cost(), link(0.01)), HOLE, 0)
    before = Lanes(staircase_restore(fast))
    behind = Lanes(staircase_restore(fast, upstream=before.restore))
    assert before.compute() is not None
    while not before.restore.closing:
        assert before.load() is not None
    assert behind.compute() is None
    assert not behind.restore.closing
    before.end()
    forward = behind.compute()
    assert forward is not None and forward.span == Span(0, CHUNK)


def test_without_a_suffix_nothing_follows() -> None:
    mine = plot(world(), 0, 0, suffix=0)
    restore = staircase_restore(replace(mine), load_only=True)
    assert restore.follows_in((0.0,)) == pytest.approx(2.0)
