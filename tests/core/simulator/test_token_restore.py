"""The token-wise engine: pieces in any order, and what is left in between."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.policies import Policy
from cacheflow_sgl.core.simulator.token_restore import PAGE, token_restore
from cacheflow_sgl.core.staircase import HOLE
from tests.core.simulator.restoring import NOW, Lanes, plot, walk
from tests.core.simulator.worlds import CHUNK, CHUNK_BYTES, LAYERS, cost, link, world

policies = st.sampled_from([Policy.CAKE, Policy.CACHEFLOW])
places = st.lists(st.sampled_from([0, 0, 1, HOLE]), max_size=6).map(lambda tiers: (*tiers, 0))


@settings(deadline=None)
@given(places, policies, st.sampled_from([0.1, 1.0, 3.0]), st.data())
def test_every_page_comes_once_in_any_order(
    tiers: tuple[int, ...], policy: Policy, load_s: float, data: st.DataObject
) -> None:
    mine = world(cost(), link(load_s), link(load_s))
    lanes = Lanes(token_restore(plot(mine, *tiers), policy))
    walk(lanes, data)
    assert not lanes.running
    spans = [piece.span for piece in (*lanes.forwards, *lanes.loads)]
    pages = Counter(page for span in spans for page in range(span.start, span.stop, PAGE))
    assert pages == Counter(range(0, CHUNK * len(tiers), PAGE))
    for load in lanes.loads:
        chunks = range(load.span.start // CHUNK, -(-load.span.stop // CHUNK))
        assert {tiers[j] for j in chunks} == {load.tier}, "a hole, or two tiers at once"
    assert all(load.nbytes == load.span.tokens * CHUNK_BYTES // CHUNK for load in lanes.loads)
    assert all(forward.layers == LAYERS for forward in lanes.forwards)
    assert (lanes.restore.load_left_s, lanes.restore.compute_left_s) == (0.0, 0.0)


def test_cake_takes_whole_chunks_from_both_ends() -> None:
    lanes = Lanes(token_restore(plot(world(), 0, 0, 0, 0), Policy.CAKE))
    assert not lanes.restore.closing
    assert (lanes.restore.compute_left_s, lanes.restore.load_left_s) == (4.0, 4.0)
    assert (lanes.restore.step_s, lanes.restore.step_load_s) == (1.0, 1.0)
    forward, load = lanes.compute(), lanes.load()
    assert forward is not None and load is not None
    assert (forward.span, forward.layers) == (Span(0, CHUNK), LAYERS)
    assert load.span == Span(3 * CHUNK, 4 * CHUNK)
    assert (load.first_layer, load.stop_layer, load.nbytes) == (0, LAYERS, CHUNK_BYTES)
    assert (lanes.restore.compute_left_s, lanes.restore.load_left_s) == (2.0, 2.0)
    assert not lanes.restore.computed(0), "nothing goes downstream"


@pytest.mark.parametrize(("load_s", "loads"), [(0.01, True), (50.0, False)])
def test_cacheflow_takes_the_better_single_way_whole(load_s: float, loads: bool) -> None:
    lanes = Lanes(token_restore(plot(world(cost(), link(load_s)), 0, 0, 0), Policy.CACHEFLOW))
    assert lanes.restore.closing == loads
    if loads:
        assert lanes.restore.follows_in((2.5,)) == pytest.approx(2.53)
        load = lanes.load()
        assert load is not None and load.span == Span(0, 3 * CHUNK)
        assert lanes.restore.all_claimed
        assert lanes.restore.load_tiers == ()
    else:
        assert lanes.restore.load_tiers == ()
        assert lanes.restore.load_left_s == lanes.restore.step_load_s == 0.0
        for j in range(3):
            forward = lanes.compute()
            assert forward is not None and forward.span == Span(j * CHUNK, (j + 1) * CHUNK)
            lanes.end()
    assert lanes.restore.complete != loads
    assert lanes.restore.step_s == 0.0


def test_a_load_alone_is_no_way_over_a_hole() -> None:
    lanes = Lanes(token_restore(plot(world(cost(), link(0.01)), 0, HOLE, 0), Policy.CACHEFLOW))
    assert not lanes.restore.closing


def test_a_hole_is_nothing_to_load() -> None:
    """Or a batch that lets nobody compute before their loads would wait for it for good."""
    restore = token_restore(plot(world(), HOLE, 0, 0), Policy.CAKE)
    lanes = Lanes(restore)
    assert (restore.load_left_s, restore.step_load_s) == (2.0, 0.0)
    lanes.load()
    assert restore.load_left_s == 1.0
    lanes.load()
    assert restore.load_left_s == 0.0
    assert restore.compute_left_s == 1.0
    assert restore.next_forward(NOW) is not None


def test_a_prefix_is_not_complete_while_its_last_piece_is_on_its_way() -> None:
    lanes = Lanes(token_restore(plot(world(), 0, 0), Policy.CAKE))
    lanes.load()
    lanes.compute()
    lanes.end(0)
    assert not lanes.restore.complete
    lanes.end(0)
    assert lanes.restore.complete
