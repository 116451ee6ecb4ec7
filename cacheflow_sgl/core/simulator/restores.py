"""What the simulated scheduler asks of a prefix that comes back on one stage, and is given.

A restore hands out pieces of work: forwards and loads. There are two kinds, `staircase_restore` and
`token_restore`; both are the claims and the planners of the core, priced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.simulator.beliefs import Beliefs


@dataclass(slots=True)
class Forward:
    """A piece for the compute lane: a forward of `span` through the first `layers` layers."""

    span: Span
    layers: int
    ended: Callable[[], None]


@dataclass(slots=True)
class Load:
    """A piece for a link."""

    span: Span
    first_layer: int
    stop_layer: int
    """It brings layers [first, stop), in that order."""
    tier: int
    nbytes: int
    ended: Callable[[], None]
    what: str = "load"


@dataclass(frozen=True)
class Plot:
    """The prefix of one request on one stage, chunk by chunk, and what it costs there."""

    chunks: Sequence[Span]
    tiers: Sequence[int]
    layers: int
    bytes_per_token: float
    """Bytes of KV of one token in these layers."""
    boundary_bytes_per_token: float
    """Bytes of stored input that must be loaded of a token to compute it."""
    beliefs: Beliefs
    suffix: Span
    """The first forward behind the prefix."""

    @property
    def span(self) -> Span:
        """All chunks."""
        return Span(self.chunks[0].start, self.chunks[-1].stop)

    def forward_s(self, span: Span, layers: int) -> float:
        """Predicted seconds of a forward."""
        return self.beliefs.compute.seconds(span.start, span.tokens, layers)

    def layer_bytes(self, chunk: int) -> float:
        """Bytes of KV of one layer of a chunk."""
        return self.chunks[chunk].tokens * self.bytes_per_token / self.layers

    def layer_s(self, chunk: int) -> float:
        """Predicted seconds to load one layer of a chunk, latency aside."""
        return self.layer_bytes(chunk) / self.beliefs.links[self.tiers[chunk]].bytes_per_s


class Restore(Protocol):
    """What the simulated scheduler asks of a restore; seconds left are predicted, of what is
    unclaimed."""

    @property
    def compute_left_s(self) -> float:
        """To compute all that is unclaimed."""

    @property
    def load_left_s(self) -> float:
        """To load all that is unclaimed."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of the next forward."""

    @property
    def step_load_s(self) -> float:
        """Predicted seconds to load what it computes; 0 where it can't be loaded."""

    @property
    def complete(self) -> bool:
        """Every piece has ended and the prefix is on the device."""

    @property
    def closing(self) -> bool:
        """Nothing is left to compute: the suffix may follow the loads."""

    @property
    def all_claimed(self) -> bool:
        """Nothing is left to claim: the suffix may follow the loads through the layers."""

    def follows_in(self, waits_s: Sequence[float]) -> float:
        """Predicted seconds until the suffix may follow the last loads, once `closing`."""

    @property
    def load_tiers(self) -> tuple[int, ...]:
        """Those on whose links something is to be loaded now."""

    def computed(self, chunk: int) -> bool:
        """Whether all layers of a chunk were computed here, so that the next stage can go on."""

    def next_forward(self, waits_s: Sequence[float]) -> Forward | None:
        """Claim for the compute lane; None: not now. Each link is free again in its `waits_s`."""

    def next_load(self, tier: int, step_left_s: float) -> Load | None:
        """Claim for a link; None: not now. The forward that runs ends in `step_left_s`."""
