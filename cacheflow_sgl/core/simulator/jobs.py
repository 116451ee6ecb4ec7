"""A request on its way through the stages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cacheflow_sgl.core.batch import Candidate
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.simulator.requests import Request
from cacheflow_sgl.core.simulator.restores import Restore
from cacheflow_sgl.core.simulator.result import Served


@dataclass(frozen=True, slots=True)
class Landing:
    """When the layers [first_layer, stop_layer) of a load land, one after the other."""

    start_s: float
    end_s: float
    first_layer: int
    stop_layer: int

    def earliest_s(self, suffix_s: float, layers: int) -> float:
        """When a suffix may start that takes `suffix_s` through `layers` and never waits for it."""
        count = max(self.stop_layer - self.first_layer, 1)
        first_s = self.start_s + (self.end_s - self.start_s) / count
        layer_s = suffix_s / layers
        last_layer = max(self.stop_layer - 1, 0)
        return max(first_s - layer_s * self.first_layer, self.end_s - layer_s * last_layer)


@dataclass
class Progress:
    """How far one request is on one stage."""

    restore: Restore | None
    """None where nothing is to be brought back."""
    suffix_at: int
    """Tokens of the prompt that are there once the restore is: prefilled up to here."""
    suffix_from_s: float
    """When the suffix may start; infinite while that isn't known."""
    suffix_begun: bool = False
    candidate: Candidate = field(init=False)
    landings: dict[int, Landing] = field(default_factory=dict)
    """Loads on their way."""


@dataclass
class Job:
    """One admitted request."""

    request: Request
    served: Served
    stages: list[Progress] = field(default_factory=list)
    prefilled: bool = False
    """It has its first token."""

    @property
    def tokens(self) -> int:
        """KV tokens that it holds in the end."""
        return self.request.prompt_tokens + self.request.output_tokens

    def next_suffix(self, stage: int, chunk: int) -> Span | None:
        """The next forward of the suffix on a stage; None where its input isn't there yet."""
        at = self.stages[stage].suffix_at
        limit = self.stages[stage - 1].suffix_at if stage else self.request.prompt_tokens
        # A stage whose own restore isn't over passes nothing on.
        if stage and self.stages[stage - 1].suffix_from_s == math.inf:
            limit = at
        stop = min(at + chunk, limit)
        return Span(at, stop) if stop > at else None
