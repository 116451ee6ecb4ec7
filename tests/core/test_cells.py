"""Claims over chunk x layer: what each lane gets, and what a failure costs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from cacheflow_sgl.core.cells import CellClaims, ComputeCells, LoadCells
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.staircase import HOLE


def claims(chunks: int, layers: int, holes: Sequence[int] = ()) -> CellClaims:
    return in_tiers([HOLE if j in holes else 0 for j in range(chunks)], layers)


def in_tiers(tiers: Sequence[int], layers: int) -> CellClaims:
    spans = [Span(100 + 16 * j, 116 + 16 * j) for j in range(len(tiers))]
    return CellClaims(spans, layers, tiers)


def load_all(cells: CellClaims, layers: int = 99, tier: int = 0) -> list[LoadCells]:
    """Claim all that loads of a tier may claim, without ending any of it."""
    found = []
    while (claim := cells.claim_load(layers, tier)) is not None:
        found.append(claim)
    return found


def compute(cells: CellClaims, layers: int) -> int:
    """Claim and compute the next chunk; how many layers of it."""
    claim = cells.claim_compute(layers)
    assert claim is not None
    cells.computed(claim)
    return claim.layers


@pytest.mark.parametrize(
    ("spans", "layers", "tiers", "message"),
    [
        ([], 4, [], "nothing to restore"),
        ([Span(0, 16)], 0, [0], "nothing to restore"),
        ([Span(0, 16), Span(32, 48)], 4, [0, 0], "without gaps"),
        ([Span(0, 16)], 4, [0, HOLE], "1 chunks, but tiers of 2"),
    ],
)
def test_what_is_no_restore_is_refused(
    spans: list[Span], layers: int, tiers: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CellClaims(spans, layers, tiers)


def test_compute_goes_up_from_the_front_and_never_higher_than_before() -> None:
    cells = claims(3, 8)
    assert [cells.claim_compute(n) for n in (5, 8, 3)] == [
        ComputeCells(0, 5),
        ComputeCells(1, 5),
        ComputeCells(2, 3),
    ]
    assert cells.claim_compute(8) is None
    assert cells.meetings == (5, 5, 3)


def test_loads_go_down_from_the_tail() -> None:
    cells = claims(2, 5)
    assert load_all(cells, 3) == [
        LoadCells(1, 2, 5),
        LoadCells(1, 0, 2),
        LoadCells(0, 2, 5),
        LoadCells(0, 0, 2),
    ]
    assert cells.unclaimed_load == 0


def test_what_lies_above_compute_is_loaded_first_and_upward() -> None:
    cells = claims(3, 6)
    assert cells.claim_load(2, 0) == LoadCells(2, 4, 6)
    compute(cells, 2)
    compute(cells, 1)
    assert load_all(cells, 4)[:3] == [LoadCells(0, 2, 6), LoadCells(1, 1, 5), LoadCells(1, 5, 6)]


def test_the_lanes_meet_inside_a_chunk() -> None:
    cells = claims(1, 8)
    assert cells.claim_load(3, 0) == LoadCells(0, 5, 8)
    assert cells.ceiling == 5
    assert cells.claim_compute(8) == ComputeCells(0, 5)
    assert cells.claim_load(3, 0) is None
    assert (cells.next_chunk, cells.ceiling) == (None, 0)


def test_with_one_layer_it_is_the_two_pointers() -> None:
    cells = claims(4, 1)
    assert compute(cells, 1) == 1
    assert cells.claim_load(1, 0) == LoadCells(3, 0, 1)
    assert compute(cells, 1) == 1
    assert cells.claim_load(1, 0) == LoadCells(2, 0, 1)
    assert cells.claim_compute(1) is None


def test_it_has_finished_when_all_has_landed_and_is_computed() -> None:
    cells = claims(2, 4)
    first = cells.claim_compute(4)
    load = cells.claim_load(4, 0)
    assert first is not None and load is not None
    cells.landed(load)
    assert (cells.finished, cells.position) == (False, 100)
    cells.computed(first)
    assert (cells.finished, cells.position) == (True, 132)
    assert (cells.computed_cells, cells.loaded_cells, cells.wasted_cells) == (4, 4, 0)


def test_a_hole_waits_for_all_before_it_and_takes_all_layers() -> None:
    cells = claims(3, 4, holes=[1])
    compute(cells, 3)
    assert (cells.next_chunk, cells.ceiling) == (1, 0)
    assert cells.claim_compute(4) is None
    rest = cells.claim_load(4, 0)
    assert rest == LoadCells(0, 3, 4)
    assert cells.claim_compute(4) is None
    cells.landed(rest)
    assert cells.claim_compute(1) == ComputeCells(1, 4)


def test_a_chunk_behind_a_hole_may_be_computed_through_all_layers() -> None:
    cells = claims(3, 4, holes=[1])
    compute(cells, 1)
    rest = cells.claim_load(4, 0)
    assert rest is not None
    cells.landed(rest)
    compute(cells, 1)
    assert cells.claim_compute(4) == ComputeCells(2, 4)


def test_loads_take_the_front_most_segment_first() -> None:
    cells = claims(5, 2, holes=[2])
    assert [claim.chunk for claim in load_all(cells)] == [1, 0, 4, 3]


def test_each_tier_has_its_own_tail() -> None:
    cells = in_tiers([1, 1, 0, HOLE, 0, 1], 4)
    assert [(claim.chunk, claim.start) for claim in load_all(cells, 3, tier=1)] == [
        (1, 1),
        (1, 0),
        (0, 1),
        (0, 0),
        (5, 1),
        (5, 0),
    ]
    assert cells.unclaimed_load == 8
    assert [claim.chunk for claim in load_all(cells)] == [2, 4]
    assert cells.next_load(0) is cells.next_load(1) is cells.next_load(2) is None


def test_each_tier_brings_its_own_rests() -> None:
    cells = in_tiers([1, 0, 1], 4)
    for layers in (3, 2, 1):
        compute(cells, layers)
    assert load_all(cells) == [LoadCells(1, 2, 4)]
    assert load_all(cells, tier=1) == [LoadCells(0, 3, 4), LoadCells(2, 1, 4)]


def test_compute_never_passes_what_was_loaded_before_the_tail() -> None:
    cells = in_tiers([1, 1, 0, 0], 4)
    assert cells.claim_load(3, 1) == LoadCells(1, 1, 4)
    assert [compute(cells, 4) for _ in range(3)] == [4, 1, 1]
    assert cells.claim_load(9, 0) == LoadCells(2, 1, 4)
    assert (cells.next_chunk, cells.ceiling) == (3, 1)
    blocked = in_tiers([1, 0], 4)
    assert blocked.claim_load(4, 1) == LoadCells(0, 0, 4)
    assert (blocked.next_chunk, blocked.ceiling) == (1, 0)
    assert blocked.claim_compute(4) is None


def test_what_failed_in_the_middle_lets_compute_pass_and_divides_the_loads() -> None:
    cells = in_tiers([0, 0, 1, 0], 4)
    middle = cells.claim_load(4, 1)
    assert middle == LoadCells(2, 0, 4)
    assert cells.next_load(0) == 3
    cells.failed(middle)
    assert [claim.chunk for claim in load_all(cells)] == [1, 0, 3]


def test_of_a_chunk_whose_load_failed_everything_is_computed() -> None:
    cells = claims(3, 4)
    tail = cells.claim_load(4, 0)
    part = cells.claim_load(2, 0)
    assert part == LoadCells(1, 2, 4)
    assert tail is not None
    cells.landed(tail)
    cells.failed(part)
    compute(cells, 4)
    assert compute(cells, 1) == 4
    assert cells.finished
    assert (cells.computed_cells, cells.loaded_cells, cells.wasted_cells) == (8, 4, 0)


def test_what_had_landed_or_was_computed_of_it_is_wasted() -> None:
    cells = claims(1, 8)
    top = cells.claim_load(2, 0)
    compute(cells, 3)
    rest = cells.claim_load(2, 0)
    assert (top, rest) == (LoadCells(0, 6, 8), LoadCells(0, 3, 5))
    cells.landed(top)
    cells.failed(rest)
    assert cells.wasted_cells == 2 + 3
    assert compute(cells, 8) == 8
    assert cells.finished


def test_it_is_not_computed_while_a_load_can_still_write_to_it() -> None:
    cells = claims(1, 4)
    load, other = cells.claim_load(2, 0), cells.claim_load(1, 0)
    assert load is not None and other is not None
    cells.failed(load)
    assert cells.claim_compute(4) is None
    cells.landed(other)
    assert cells.wasted_cells == 1
    assert cells.claim_compute(4) == ComputeCells(0, 4)


def test_it_fails_once_whatever_else_fails_of_it() -> None:
    cells = claims(2, 4)
    claim, loads = cells.claim_compute(1), [cells.claim_load(1, 0), cells.claim_load(2, 0)]
    assert loads == [LoadCells(0, 1, 2), LoadCells(0, 2, 4)]
    for load in loads:
        assert load is not None
        cells.failed(load)
        cells.check_integrity()
    assert cells.claim_compute(4) is None  # its first forward is still on its way
    assert claim is not None
    cells.computed(claim)
    assert cells.wasted_cells == 1
    assert cells.claim_compute(4) == ComputeCells(0, 4)


def test_compute_goes_back_for_a_failed_rest_and_keeps_what_lies_behind() -> None:
    cells = claims(3, 4)
    for _ in range(2):
        compute(cells, 2)
    rest = cells.claim_load(4, 0)
    assert rest == LoadCells(0, 2, 4)
    cells.failed(rest)
    assert cells.claim_compute(1) == ComputeCells(0, 4)
    assert cells.claim_compute(4) == ComputeCells(2, 2)
    assert cells.meetings == (4, 2, 2)


def test_after_a_stop_compute_brings_what_was_unclaimed() -> None:
    cells = claims(4, 4)
    tail = cells.claim_load(4, 0)
    compute(cells, 2)  # its rest would have been loaded
    cells.stop_loading()
    assert cells.claim_load(4, 0) is None
    assert tail is not None
    cells.landed(tail)
    assert [compute(cells, 1) for _ in range(3)] == [4, 4, 4]
    assert cells.finished
    assert (cells.loaded_cells, cells.wasted_cells) == (4, 2)


def test_a_claim_ends_once() -> None:
    cells = claims(1, 4)
    claim, load = cells.claim_compute(2), cells.claim_load(2, 0)
    assert claim is not None and load is not None
    cells.computed(claim)
    cells.landed(load)
    with pytest.raises(ValueError, match=r"ComputeCells\(chunk=0, layers=2\) is not on its way"):
        cells.computed(claim)
    for end in (cells.landed, cells.failed):
        with pytest.raises(ValueError, match="not on its way"):
            end(load)


def test_integrity_is_checked_with_a_picture() -> None:
    cells = claims(2, 4)
    cells.claim_load(3, 0)
    cells.check_integrity()
    cells._chunks[1].high = 0
    with pytest.raises(AssertionError, match=r"chunk 1 lost loads: 4 layers(.|\n)*1: _Chunk"):
        cells.check_integrity()
    cells._chunks[1].high = 1
    cells._queues[0].tails.remove(1)
    with pytest.raises(AssertionError, match="no load would come for the rest of chunk 1"):
        cells.check_integrity()


def test_lanes_in_threads_bring_every_cell_once() -> None:
    cells = in_tiers([1, 0, 1, 0, 0, HOLE, 1, 1, 0, 0, 1, 0], 8)

    def load(layers: int, tier: int) -> None:
        while not cells.finished:
            claim = cells.claim_load(layers, tier)
            if claim is not None and claim.chunk == 9 and claim.stop == 8:
                cells.failed(claim)
            elif claim is not None:
                cells.landed(claim)

    each = [(1, 0), (3, 0), (2, 1)]
    lanes = [threading.Thread(target=load, args=lane, daemon=True) for lane in each]
    for lane in lanes:
        lane.start()
    while not cells.finished:
        claim = cells.claim_compute(4)
        if claim is not None:
            cells.computed(claim)
    for lane in lanes:
        lane.join(timeout=30)
    cells.check_integrity()
    assert cells.computed_cells + cells.loaded_cells == 12 * 8
    assert cells.position == 100 + 12 * 16
