"""Which blocks of a trace lie on the device, and which in the tiers below: LRU everywhere."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from cacheflow_sgl.core.simulator.requests import Found, Request
from cacheflow_sgl.core.staircase import HOLE


class _Level:
    """Blocks in LRU order, at most `capacity` of them (None: no end)."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def put(self, blocks: Iterable[int]) -> list[int]:
        """Make them the most recent ones, the last one most; what had to go, oldest first."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        capacity = len(self._blocks) if self._capacity is None else self._capacity
        return [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - capacity)]


class BlockCache:
    """A device cache over tiers; what one level evicts goes to the next, the last one drops it.

    Args:
        block_tokens: tokens of a block, which is also the chunk of a restore.
        device_tokens: capacity of the device.
        tier_tokens: capacity of each tier, fastest first; None for one without end.
    """

    def __init__(
        self, block_tokens: int, device_tokens: int, tier_tokens: Sequence[int | None] = (None,)
    ) -> None:
        self._block_tokens = block_tokens
        capacities = [device_tokens, *tier_tokens]
        self._levels = [
            _Level(None if tokens is None else max(tokens // block_tokens, 1))
            for tokens in capacities
        ]

    def find(self, request: Request) -> Found:
        """Look its blocks up; the last token of the prompt is always left to compute."""
        device, *tiers = self._levels
        blocks = request.blocks[: (request.prompt_tokens - 1) // self._block_tokens]
        resident = 0
        while resident < len(blocks) and blocks[resident] in device:
            resident += 1
        places = [self._place(block, tiers) for block in blocks[resident:]]
        while places and places[-1] == HOLE:
            places.pop()
        return Found(resident * self._block_tokens, tuple(places))

    def prefilled(self, request: Request) -> None:
        """Its blocks are the most recent ones of the device, front last: tails go first."""
        # All at once: were a tail put in alone, the front of its own prompt could go for it.
        moving = list(reversed(request.blocks[: request.prompt_tokens // self._block_tokens]))
        for level in self._levels:
            moving = level.put(moving)

    def _place(self, block: int, tiers: Sequence[_Level]) -> int:
        # A block on the device behind one that isn't counts as lying in the fastest tier.
        if block in self._levels[0]:
            return 0
        return next((tier for tier, level in enumerate(tiers) if block in level), HOLE)
