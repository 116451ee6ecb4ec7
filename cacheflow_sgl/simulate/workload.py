"""What is served in a simulation: given prompts, or the requests of a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cacheflow_sgl.core.simulator.cache import BlockCache
from cacheflow_sgl.core.simulator.requests import Evicted, Request, Residency, together


@dataclass(frozen=True)
class Prompts:
    """Prompts that arrive together; the prefix of each was evicted from the device.

    Args:
        prefix_tokens: of each request. What is no whole chunk at its end is computed.
        suffix_tokens: new tokens behind each.
    """

    prefix_tokens: tuple[int, ...]
    suffix_tokens: int
    kv_tokens: ClassVar[None] = None
    """No limit: all run at once."""

    @property
    def name(self) -> str:
        """Length and number of the prefixes."""
        lengths = sorted(set(self.prefix_tokens))
        length = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]}-{lengths[-1]}"
        return f"{length} x {len(self.prefix_tokens)}"

    @property
    def requests(self) -> list[Request]:
        """One output token each."""
        return together(prefix + self.suffix_tokens for prefix in self.prefix_tokens)

    def chunk(self, chunk: int) -> int:
        """Tokens of a forward, where the profile says `chunk`."""
        return chunk

    def residency(self, chunk: int) -> Residency:
        """All prefixes in the tier."""
        return Evicted(self.suffix_tokens, chunk)


@dataclass(frozen=True)
class Trace:
    """The requests of a trace; what the device's LRU evicts lies in the tier.

    Args:
        name: of the file, and what its lengths are where they are estimates.
        requests: in order of arrival.
        block_tokens: tokens that a hash id stands for.
        device_tokens: KV that the device holds: as a cache, and again of requests that run.
        tier_tokens: KV that the tier holds; None: without end.
    """

    name: str
    requests: Sequence[Request]
    block_tokens: int
    device_tokens: int
    tier_tokens: int | None

    @property
    def kv_tokens(self) -> int:
        """KV tokens that running requests may hold together."""
        return self.device_tokens

    def chunk(self, chunk: int) -> int:
        """Tokens of a forward: a block, whatever the profile says."""
        return self.block_tokens

    def residency(self, chunk: int) -> Residency:
        """Empty caches."""
        return BlockCache(chunk, self.device_tokens, [self.tier_tokens])


Workload = Prompts | Trace


def prompts(
    prefix_tokens: Sequence[int],
    suffix_tokens: int,
    batches: Sequence[int],
    *,
    mixed: bool = False,
    seed: int = 0,
) -> Iterator[Prompts]:
    """Every length with every batch, or in every batch all lengths in equal shares.

    Args:
        prefix_tokens: lengths.
        suffix_tokens: new tokens behind each prefix.
        batches: how many arrive together.
        mixed: all lengths in each batch.
        seed: of the order of mixed lengths.
    """
    for batch in batches:
        if mixed:
            lengths = [prefix_tokens[at % len(prefix_tokens)] for at in range(batch)]
            random.Random(seed).shuffle(lengths)
            yield Prompts(tuple(lengths), suffix_tokens)
        else:
            for length in prefix_tokens:
                yield Prompts((length,) * batch, suffix_tokens)
