"""Drives one restore by hand: the lanes end their pieces whenever a test says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hypothesis import strategies as st

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.simulator.beliefs import Beliefs
from cacheflow_sgl.core.simulator.restores import Forward, Load, Plot, Restore
from cacheflow_sgl.core.simulator.world import World
from tests.core.simulator.worlds import CHUNK, LAYERS

NOW = (0.0, 0.0)
"""Waits of two links that are free."""


def plot(
    mine: World,
    *tiers: int,
    boundary: int = 0,
    suffix: int = CHUNK,
    beliefs: Beliefs | None = None,
) -> Plot:
    """A plot of these chunks, all layers."""
    chunks = [Span(j * CHUNK, (j + 1) * CHUNK) for j in range(len(tiers))]
    stop = chunks[-1].stop
    return Plot(
        chunks=chunks,
        tiers=tiers,
        layers=LAYERS,
        bytes_per_token=mine.kv_bytes_per_token,
        boundary_bytes_per_token=boundary,
        beliefs=beliefs or Beliefs.exact(mine),
        suffix=Span(stop, stop + suffix),
    )


@dataclass
class Lanes:
    """One compute lane and two links, and what was handed out to them."""

    restore: Restore
    forwards: list[Forward] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    running: list[Callable[[], None]] = field(default_factory=list)

    def compute(self) -> Forward | None:
        """Ask for a forward, as a stage does: not while closing."""
        forward = None if self.restore.closing else self.restore.next_forward(NOW)
        if forward is not None:
            self.forwards.append(forward)
            self.running.append(forward.ended)
        return forward

    def load(self, step_left_s: float = 0.0) -> Load | None:
        """Ask for the next load, link by link."""
        for tier in self.restore.load_tiers:
            load = self.restore.next_load(tier, step_left_s)
            if load is not None:
                assert load.tier == tier
                self.loads.append(load)
                self.running.append(load.ended)
                return load
        return None

    def end(self, which: int = 0) -> bool:
        """Let a piece end."""
        self.running.pop(which)()
        return True

    def end_first(self) -> None:
        """Let the first piece end that is on its way, if one is."""
        if self.running:
            self.end()

    def loaded_bytes(self) -> Counter[int]:
        """By tier, KV only."""
        moved: Counter[int] = Counter()
        for load in self.loads:
            if load.what == "load":
                moved[load.tier] += load.nbytes
        return moved


def walk(lanes: Lanes, data: st.DataObject) -> None:
    """Go on in any order until all is done. `AssertionError` where nobody can."""
    while not lanes.restore.complete:
        ends = [partial(lanes.end, which) for which in range(len(lanes.running))]
        moves: list[Callable[[], object]] = [lanes.compute, lanes.load, *ends]
        first = data.draw(st.integers(0, len(moves) - 1))
        tries = (move() for move in (*moves[first:], *moves[:first]))
        assert any(done is not None for done in tries), "nobody can go on"
