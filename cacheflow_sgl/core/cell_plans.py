"""How much each lane of a staircase restore claims next, by what both are predicted to take.

The counterpart of `plans.compute_claim` and `load_claim` for cells of chunk x layer. Once the loads
are predicted to keep ahead of the suffix, nothing is computed any more: what is left is loaded
layer by layer while the suffix goes through the layers behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cacheflow_sgl.core.plans import MARGIN

_Error = tuple[float, float]
"""Factors by which predicted times of compute and of loads are wrong."""
_NO_ERROR: _Error = (1.0, 1.0)
_SLOW_GPU: _Error = (1.25, 0.8)
"""A GPU that is slower and a link that is faster than believed."""
_SLOW_LINK: _Error = (1.0, 2.5)
"""A link that has halved, while a load was on its way."""
_SLOWING_LINK: _Error = (1.0, 2.0)
"""A link that halves, while nothing has been loaded yet."""
_BEARABLE = 0.03
"""Share by which a cut may be worse than the better single way, if predictions are wrong."""
_CUTS = 16
"""Cuts of a chunk that are looked at, beside none."""
_LATENCIES_PER_LOAD = 4
"""A load takes at least this many latencies, so that latency never dominates the link."""


@dataclass(frozen=True, slots=True)
class NextChunk:
    """What is known when the compute lane could take the next chunk. Seconds, predicted."""

    compute_s: Callable[[int], float]
    """Of a forward of this chunk through that many layers."""
    ceiling: int
    """Layers of this chunk that compute may take; loads have claimed the others."""
    compute_left_s: float
    """To compute all that is left of the prefix, this chunk included."""
    fresh: bool
    """Nothing of the prefix has been loaded yet."""
    wait_s: float
    """Until its links are free for the next load."""
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
    """Layers of the next chunk to compute; 0 where loading all that is left is as good.

    All that are free, as long as the loads are sure to need longer for the rest, or can't even
    begin before the forward has ended. Near the meeting the cut at which chunk and suffix are
    predicted to end first, of those that no likely error makes worse than computing or loading all
    that is left would be; where there is none, the one that is least worse. None where that is
    predicted to save less than `MARGIN`, for loads in the order of the layers leave the GPU free.
    """
    ceiling = chunk.ceiling
    errors = (_NO_ERROR, _SLOWING_LINK if chunk.fresh else _SLOW_LINK, _SLOW_GPU)
    if all(compute * chunk.compute_s(ceiling) <= link * chunk.wait_s for compute, link in errors):
        return ceiling  # done before its loads could even begin
    if all(_sure(chunk, *error) for error in errors):
        return ceiling
    cuts = sorted({round(ceiling * part / _CUTS) for part in range(_CUTS + 1)})
    ends = [_Ends(cuts, chunk, *error) for error in errors]
    worst = [max(end.regrets[at] for end in ends) for at in range(len(cuts))]
    expected_s = ends[0].finish_s
    bearable = [at for at, regret in enumerate(worst) if regret <= 1 + _BEARABLE]
    if not bearable:
        return cuts[min(range(len(cuts)), key=worst.__getitem__)]
    best = min(bearable, key=expected_s.__getitem__)
    if bearable[0] == 0 and expected_s[best] > (1 - MARGIN) * expected_s[0]:
        return 0
    return cuts[best]


def _sure(chunk: NextChunk, compute: float, link: float) -> bool:
    """Whether the loads outlast the whole chunk and the suffix, times wrong by these factors."""
    left_s = link * (chunk.loads_s - chunk.ceiling * chunk.load_layer_s)
    return compute * (chunk.compute_s(chunk.ceiling) + chunk.suffix_s) <= left_s


class _Ends:
    """When chunk and suffix end for each cut, if predictions are wrong by these factors."""

    def __init__(self, cuts: Sequence[int], chunk: NextChunk, compute: float, link: float) -> None:
        suffix_s, share = compute * chunk.suffix_s, 1 / chunk.layers
        self.finish_s = []
        for cut in cuts:
            # Loads that go layer by layer hold the suffix at its first layer, or at its last.
            loads_s = link * (chunk.loads_s - cut * chunk.load_layer_s)
            computed_s = compute * chunk.compute_s(cut) if cut else 0.0
            start_s = max(computed_s, loads_s * share)
            self.finish_s.append(max(start_s + suffix_s, loads_s + suffix_s * share))
        single_s = min(self.finish_s[0], compute * chunk.compute_left_s + suffix_s)
        self.regrets = [seconds / single_s if single_s else 1.0 for seconds in self.finish_s]
        """Over the better of loading and computing all that is left."""


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
