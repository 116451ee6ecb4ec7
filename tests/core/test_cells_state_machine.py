"""Any interleaving of the lanes, against a model with one state a cell."""

from __future__ import annotations

from enum import Enum, auto
from itertools import product

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cacheflow_sgl.core.cells import CellClaims, ComputeCells, LoadCells
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.staircase import HOLE

TOKENS = 16


class State(Enum):
    FREE = auto()
    COMPUTING = auto()
    COMPUTED = auto()
    LOADING = auto()
    LANDED = auto()


CLAIMED_BY_COMPUTE = (State.COMPUTING, State.COMPUTED)
DONE = (State.COMPUTED, State.LANDED)


class Model:
    """A state for each cell, and which chunks are holes; every answer is found by looking at all.

    The claims that were on their way when their chunk became a hole are `stale`: they have no cells
    any more, but nothing else may be done to the chunk before they end.
    """

    def __init__(self, tiers: list[int], layers: int) -> None:
        self.layers = layers
        self.tiers = tiers
        self.hole = [tier == HOLE for tier in tiers]
        self.cells = [[State.FREE] * layers for _ in tiers]
        self.stale: list[ComputeCells | LoadCells] = []
        self.wasted = 0

    def count(self, *states: State) -> int:
        return sum(cell in states for row in self.cells for cell in row)

    def run(self, chunk: int, state: State) -> range:
        """The layers of a chunk in this state: always one run, of the free ones."""
        found = [layer for layer, cell in enumerate(self.cells[chunk]) if cell is state]
        assert found == list(range(found[0], found[-1] + 1)) if found else True
        return range(found[0], found[-1] + 1) if found else range(0)

    def compute_claimed(self, chunk: int) -> int:
        return sum(cell in CLAIMED_BY_COMPUTE for cell in self.cells[chunk])

    @property
    def next_chunk(self) -> int | None:
        rows = enumerate(self.cells)
        # Compute starts at the bottom: where that is free and not the rest above a claim of its.
        return next((j for j, row in rows if row[0] is State.FREE), None)

    @property
    def ceiling(self) -> int:
        j = self.next_chunk
        if j is None:
            return 0
        if not self.hole[j]:
            below = self.layers if j == 0 else self.compute_claimed(j - 1)
            return min(len(self.run(j, State.FREE)), below)
        there = all(cell in (*DONE, State.COMPUTING) for row in self.cells[:j] for cell in row)
        idle = all(claim.chunk != j for claim in self.stale)
        return self.layers if there and idle else 0

    def to_compute(self, layers: int) -> ComputeCells | None:
        j, most = self.next_chunk, self.ceiling
        if j is None or layers < 1 or not most:
            return None
        return ComputeCells(j, most if self.hole[j] else min(layers, most))

    @property
    def loadable(self) -> list[int]:
        """Chunks of which loads may claim cells."""
        rows = enumerate(self.cells)
        return [j for j, row in rows if not self.hole[j] and State.FREE in row]

    def next_load(self, tier: int) -> int | None:
        chunks = [j for j in self.loadable if self.tiers[j] == tier]
        rests = [j for j in chunks if self.compute_claimed(j)]
        if rests or not chunks:
            return rests[0] if rests else None
        holes = [j for j, hole in enumerate(self.hole) if hole and j > chunks[0]]
        return max(j for j in chunks if j < min(holes, default=len(self.hole)))

    def to_load(self, layers: int, tier: int) -> LoadCells | None:
        j = self.next_load(tier)
        if layers < 1 or j is None:
            return None
        free = self.run(j, State.FREE)
        if self.compute_claimed(j):
            return LoadCells(j, free.start, min(free.start + layers, free.stop))
        return LoadCells(j, max(free.stop - layers, 0), free.stop)

    def turn(self, chunk: int, layers: range, before: State, after: State) -> None:
        for layer in layers:
            assert self.cells[chunk][layer] is before, f"({chunk}, {layer}) is not {before}"
            self.cells[chunk][layer] = after

    def make_hole(self, chunk: int, running: list[ComputeCells | LoadCells]) -> None:
        self.wasted += sum(cell in DONE for cell in self.cells[chunk])
        self.stale += [claim for claim in running if claim.chunk == chunk]
        self.hole[chunk] = True
        self.cells[chunk] = [State.FREE] * self.layers

    def may_compute(self, claim: ComputeCells) -> bool:
        """Whether all that the forward reads is there, or will be when the lane comes to it."""
        ready = (*DONE, State.COMPUTING)
        below = product(range(claim.chunk), range(claim.layers))
        return all(self.cells[j][layer] in ready for j, layer in below)


class CellsMachine(RuleBasedStateMachine):
    """The lanes in any order; each answer is the one that the model gives."""

    @initialize(
        tiers=st.lists(st.sampled_from([0, 0, 1, 1, HOLE]), min_size=1, max_size=5),
        layers=st.integers(1, 4),
        first=st.integers(0, 3),
    )
    def start(self, tiers: list[int], layers: int, first: int) -> None:
        starts = [(first + j) * TOKENS for j in range(len(tiers))]
        self.spans = [Span(start, start + TOKENS) for start in starts]
        self.cells = CellClaims(self.spans, layers, tiers)
        self.model = Model(tiers, layers)
        self.computing: list[ComputeCells] = []
        self.loading: list[LoadCells] = []

    @rule(layers=st.integers(0, 4))
    def claim_compute(self, layers: int) -> None:
        expected = self.model.to_compute(layers)
        claim = self.cells.claim_compute(layers)
        assert claim == expected
        if claim is not None:
            self.model.turn(claim.chunk, range(claim.layers), State.FREE, State.COMPUTING)
            assert self.model.may_compute(claim)
            self.computing.append(claim)

    @precondition(lambda self: self.computing)
    @rule()
    def computed(self) -> None:
        claim = self.computing.pop(0)  # the lane works in order
        self.cells.computed(claim)
        if not self.was_stale(claim):
            self.model.turn(claim.chunk, range(claim.layers), State.COMPUTING, State.COMPUTED)

    @rule(layers=st.integers(0, 4), tier=st.integers(0, 1))
    def claim_load(self, layers: int, tier: int) -> None:
        expected = self.model.to_load(layers, tier)
        claim = self.cells.claim_load(layers, tier)
        assert claim == expected
        if claim is not None:
            layers_of = range(claim.start, claim.stop)
            self.model.turn(claim.chunk, layers_of, State.FREE, State.LOADING)
            self.loading.append(claim)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.loading)), lands=True)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.loading)), lands=False)

    def end(self, claim: LoadCells, lands: bool) -> None:
        self.loading.remove(claim)
        if lands:
            self.cells.landed(claim)
            if not self.was_stale(claim):
                layers = range(claim.start, claim.stop)
                self.model.turn(claim.chunk, layers, State.LOADING, State.LANDED)
        else:
            self.cells.failed(claim)
            if claim in self.model.stale:
                self.model.stale.remove(claim)
            else:
                self.model.make_hole(claim.chunk, [*self.computing, *self.loading])

    def was_stale(self, claim: ComputeCells | LoadCells) -> bool:
        if claim not in self.model.stale:
            return False
        self.model.stale.remove(claim)
        self.model.wasted += claim.layers
        return True

    @rule(dice=st.integers(1, 8))
    def stop_loading(self, dice: int) -> None:
        if dice == 8:  # seldom, or little would be loaded
            self.cells.stop_loading()
            for j in self.model.loadable:
                self.model.make_hole(j, [*self.computing, *self.loading])

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "cells"):
            return
        cells, model = self.cells, self.model
        cells.check_integrity()
        assert (cells.next_chunk, cells.ceiling) == (model.next_chunk, model.ceiling)
        assert cells.computed_cells == model.count(State.COMPUTED)
        assert cells.loaded_cells == model.count(State.LANDED)
        assert cells.wasted_cells == model.wasted
        for tier in (0, 1):
            assert cells.next_load(tier) == model.next_load(tier)
        free = sum(model.cells[j].count(State.FREE) for j in model.loadable)
        assert cells.unclaimed_load == free
        assert cells.loads_in_flight == len(self.loading)
        assert cells.finished == (model.count(*DONE) == len(self.spans) * model.layers)
        complete = [all(cell in DONE for cell in row) for row in model.cells]
        waiting = [span.start for span, done in zip(self.spans, complete, strict=True) if not done]
        assert cells.position == (waiting or [self.spans[-1].stop])[0]
        claimed = tuple(model.compute_claimed(j) for j in range(len(self.spans)))
        assert cells.meetings == claimed

    def teardown(self) -> None:
        """From any state, if nothing stands still for ever, it ends with every cell done once."""
        if not hasattr(self, "cells"):
            return
        for turn in range(20 * len(self.spans) * self.model.layers + 10):
            if self.cells.finished:
                break
            self.claim_compute(layers=2)
            self.claim_load(layers=2, tier=turn % 2)
            if self.computing:
                self.computed()
            if self.loading:
                self.end(self.loading[0], lands=turn % 4 > 0)
        assert self.cells.finished
        for claim in list(self.loading):
            self.end(claim, lands=True)
        self.same_as_the_model()
        assert self.model.count(*DONE) == len(self.spans) * self.model.layers
        assert self.cells.position == self.spans[-1].stop
        assert not self.computing
        assert self.cells.claim_load(1, 0) is self.cells.claim_load(1, 1) is None
        assert self.cells.claim_compute(1) is None


TestCellsMachine = CellsMachine.TestCase
TestCellsMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
