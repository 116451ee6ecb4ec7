"""What a simulation found out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cacheflow_sgl.core.geometry import Span


@dataclass(slots=True)
class Served:
    """One request from its arrival to its last token. Seconds of the simulated clock."""

    rid: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    device_tokens: int = 0
    loaded_bytes: int = 0
    """KV only."""
    restored_s: float = 0.0
    """When its prefix was back on the device, on every stage."""
    first_token_s: float = 0.0
    done_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.first_token_s - self.arrived_s


NOBODY = -1
"""The request of a decode step, which is for all that run."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a lane did at one time, for one request."""

    rid: int
    what: str
    """`prefix`, `suffix`, `decode`, `load`, `boundary`."""
    start_s: float
    stop_s: float
    span: Span
    layers: int
    """How many layers of it."""


@dataclass(slots=True)
class Lane:
    """A compute lane or a link. Pieces are kept only where a simulation records."""

    busy_s: float = 0.0
    pieces: list[Piece] = field(default_factory=list)

    def busy_share(self, start_s: float, stop_s: float) -> float:
        """Share of [start_s, stop_s) in which it was busy, from the recorded pieces."""
        overlaps = (min(p.stop_s, stop_s) - max(p.start_s, start_s) for p in self.pieces)
        return sum(max(0.0, overlap) for overlap in overlaps) / (stop_s - start_s)


@dataclass(frozen=True)
class Result:
    """All requests in order of their ids, and what every lane did."""

    served: Sequence[Served]
    lanes: Mapping[str, Lane]
    """By name: `compute 0`, `I/O 0.0` (stage, then tier)."""
    end_s: float

    @property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        """TTFT of every request, seconds."""
        return np.array([served.ttft_s for served in self.served])

    @property
    def mean_ttft_s(self) -> float:
        """Mean TTFT."""
        return float(self.ttft_s.mean())

    def percentile_s(self, percent: float) -> float:
        """A percentile of TTFT, e.g. 99."""
        return float(np.percentile(self.ttft_s, percent))
