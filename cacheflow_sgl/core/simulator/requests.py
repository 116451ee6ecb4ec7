"""What arrives: requests, and where their prefixes lie when they do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `blocks` are hash ids of its chunks: equal ids mean equal prefixes.

    `after` names the request whose end starts it, `at_s` seconds later (a closed loop); without it
    `at_s` counts from the start.
    """

    rid: int
    at_s: float
    prompt_tokens: int
    output_tokens: int = 1
    blocks: tuple[int, ...] = ()
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Where the prefix of a request lies: the first tokens on the device, then chunk by chunk."""

    device_tokens: int
    tiers: tuple[int, ...]
    """Tier of each chunk behind them, `HOLE` for a hole; the last one is not a hole."""


class Residency(Protocol):
    """Knows where KV lies."""

    def find(self, request: Request) -> Found:
        """Where the prefix of a request lies now; never the whole prompt."""

    def prefilled(self, request: Request) -> None:
        """The KV of its whole prompt is on the device now."""


@dataclass(frozen=True)
class Evicted:
    """Every prefix lies in one tier: all of the prompt but the suffix, in whole chunks.

    For experiments with one given prefix; nothing is remembered.
    """

    suffix_tokens: int
    chunk: int = 512
    tier: int = 0

    def find(self, request: Request) -> Found:
        """All but `suffix_tokens`, of which there is at least one, rounded down to chunks."""
        chunks = max(request.prompt_tokens - max(self.suffix_tokens, 1), 0) // self.chunk
        return Found(0, (self.tier,) * chunks)

    def prefilled(self, request: Request) -> None:
        """Nothing is kept."""


def together(prompts: Iterable[int], output_tokens: int = 1) -> list[Request]:
    """Requests with these prompt lengths in tokens, all arriving at second 0."""
    return [Request(rid, 0.0, tokens, output_tokens) for rid, tokens in enumerate(prompts)]
