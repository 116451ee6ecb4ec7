"""How much each lane of a staircase restore claims next, by what both are predicted to take.

The counterpart of `plans.compute_claim` and `load_claim` for cells of chunk x layer. Once the loads
are predicted to keep ahead of the suffix, nothing is computed any more: what is left is loaded
layer by layer while the suffix goes through the layers behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cacheflow_sgl.core.plans import MARGIN

_LATENCIES_PER_LOAD = 4
"""A load takes at least this many latencies, so that latency never dominates the link."""


@dataclass(frozen=True, slots=True)
class NextChunk:
    """What is known when the compute lane could take the next chunk. Seconds, predicted."""

    compute_s: Callable[[int], float]
    """Of a forward of this chunk through that many layers."""
    ceiling: int
    """Layers of this chunk that compute may take; loads have claimed the others."""
    load_layer_s: float
    """To load one layer of this chunk."""
    loads_s: float
    """Until every load of the prefix has landed, if compute takes none of this chunk."""
    suffix_s: float
    """Of the forward that follows the prefix, which needs a layer only when it gets there; 0 where
    compute goes on into a hole instead, for which all must be there."""
    layers: int
    """Layers of the stage."""


def compute_layers(chunk: NextChunk) -> int:
    """Layers of the next chunk to compute; 0 where loading all that is left is as fast.

    All that are free, as long as the loads need longer for the rest than compute for these. Near
    the meeting as many as let both lanes end together, with the suffix behind them; none where that
    is predicted to save less than `MARGIN`, for loads in the order of the layers start the suffix
    sooner, and leave the GPU free.
    """

    def compute_s(layers: int) -> float:
        return chunk.compute_s(layers) if layers else 0.0

    def loads_s(layers: int) -> float:
        return chunk.loads_s - layers * chunk.load_layer_s

    def finish_s(layers: int) -> float:
        # Loads that go layer by layer hold the suffix at its first layer, or at its last.
        left_s, share = loads_s(layers), 1 / chunk.layers
        start_s = max(compute_s(layers), left_s * share)
        return max(start_s + chunk.suffix_s, left_s + chunk.suffix_s * share)

    def in_time(layers: int) -> bool:
        return compute_s(layers) <= loads_s(layers) - chunk.suffix_s

    if in_time(chunk.ceiling):
        return chunk.ceiling
    early, late = 0, chunk.ceiling
    while late - early > 1:
        middle = (early + late) // 2
        if in_time(middle):
            early = middle
        else:
            late = middle
    best = min((early, late), key=finish_s)
    return 0 if finish_s(best) > (1 - MARGIN) * finish_s(0) else best


def load_layers(*, layer_s: float, latency_s: float, step_s: float, gap_s: float) -> int:
    """Layers of one chunk that the next load should take, at least one.

    What the link moves in half a compute step; near the meeting a quarter of the gap at most, for
    the last load in flight is waited for; but up to half of it where latency would dominate.

    Args:
        layer_s: seconds to load one layer of the chunk.
        latency_s: seconds of a load beside its bytes.
        step_s: seconds of a forward of a whole chunk.
        gap_s: seconds to load all that compute may still come to first; infinite while nothing of
            the request is computed.
    """
    seconds = max(min(step_s / 2, gap_s / 4), min(_LATENCIES_PER_LOAD * latency_s, gap_s / 2))
    return max(1, round(seconds / layer_s))
