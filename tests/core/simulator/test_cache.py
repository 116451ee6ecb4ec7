"""Blocks in a device and tiers, against lists in LRU order; prompts are paths of a tree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.simulator.cache import BlockCache
from cacheflow_sgl.core.simulator.requests import Found, Request
from cacheflow_sgl.core.staircase import HOLE

BLOCK = 4


def request(blocks: tuple[int, ...], rest: int = 1) -> Request:
    """A prompt of these whole blocks and `rest` tokens."""
    return Request(0, 0.0, len(blocks) * BLOCK + rest, blocks=blocks)


def path(turns: tuple[int, ...]) -> tuple[int, ...]:
    """Ids of the blocks of a prefix: a block's id names all that is before it too."""
    ids, prefix = [], 1
    for turn in turns:
        prefix = prefix * 3 + turn
        ids.append(prefix)
    return tuple(ids)


prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple).map(path)
sequences = st.lists(prefixes, min_size=1, max_size=15)
capacities = st.integers(1, 8)


def place(cache: BlockCache, block: int) -> int | None:
    """None: on the device. Else its tier, or `HOLE`."""
    found = cache.find(request((block,)))
    if found.device_tokens:
        return None
    return found.tiers[0] if found.tiers else HOLE


class Lists:
    """The same in lists, most recent last; a block of a prompt goes in behind those after it."""

    def __init__(self, capacities: list[int | None]) -> None:
        self.capacities = capacities
        self.levels: list[list[int]] = [[] for _ in capacities]

    def prefilled(self, blocks: tuple[int, ...]) -> None:
        coming = list(blocks[::-1])
        for number, capacity in enumerate(self.capacities):
            kept = [block for block in self.levels[number] if block not in coming] + coming
            room = len(kept) if capacity is None else min(capacity, len(kept))
            self.levels[number] = kept[len(kept) - room :]
            coming = kept[: len(kept) - room]

    def place(self, block: int) -> int | None:
        at = next((n for n, level in enumerate(self.levels) if block in level), None)
        if at is None:
            return HOLE
        return None if at == 0 else at - 1


@settings(deadline=None)
@given(sequences, capacities, st.lists(capacities | st.none(), min_size=1, max_size=3))
def test_levels_are_lists_in_lru_order(
    sequence: list[tuple[int, ...]], device: int, tiers: list[int | None]
) -> None:
    cache = BlockCache(BLOCK, device * BLOCK, [t if t is None else t * BLOCK for t in tiers])
    lists = Lists([device, *tiers])
    seen = sorted({block for blocks in sequence for block in blocks})
    for blocks in sequence:
        cache.prefilled(request(blocks))
        lists.prefilled(blocks)
        assert {b: place(cache, b) for b in seen} == {b: lists.place(b) for b in seen}


@settings(deadline=None)
@given(sequences, capacities, capacities)
def test_the_device_holds_the_last_blocks_used_and_only_whole_prefixes(
    sequence: list[tuple[int, ...]], device: int, tier: int
) -> None:
    cache = BlockCache(BLOCK, device * BLOCK, [tier * BLOCK])
    used: list[int] = []
    for blocks in sequence:
        cache.prefilled(request(blocks))
        for block in reversed(blocks):
            used = [b for b in used if b != block] + [block]
    resident = {block for block in used if place(cache, block) is None}
    assert resident == set(used[-device:])
    for blocks in sequence:
        inside = [block in resident for block in blocks]
        assert inside == sorted(inside, reverse=True)


@settings(deadline=None)
@given(sequences, capacities, capacities)
def test_nothing_is_lost_in_a_last_tier_without_end(
    sequence: list[tuple[int, ...]], device: int, tier: int
) -> None:
    cache = BlockCache(BLOCK, device * BLOCK, [tier * BLOCK, None])
    for blocks in sequence:
        cache.prefilled(request(blocks))
    assert all(place(cache, block) != HOLE for blocks in sequence for block in blocks)


@settings(deadline=None)
@given(sequences, prefixes, st.integers(0, 2 * BLOCK), capacities, capacities)
def test_found_is_a_prefix_on_the_device_then_a_place_for_each_block(
    sequence: list[tuple[int, ...]], asked: tuple[int, ...], rest: int, device: int, tier: int
) -> None:
    cache = BlockCache(BLOCK, device * BLOCK, [tier * BLOCK, tier * BLOCK])
    for blocks in sequence:
        cache.prefilled(request(blocks))
    prompt = request(asked, rest)
    found = cache.find(prompt)
    assert found == cache.find(prompt)  # looking changes nothing

    blocks = asked[: max(prompt.prompt_tokens - 1, 0) // BLOCK]  # the last token is computed
    places = [place(cache, block) for block in blocks]
    resident = found.device_tokens // BLOCK
    assert found.device_tokens % BLOCK == 0
    assert places[:resident] == [None] * resident
    assert None not in places[resident:]  # of whole prefixes, none lies behind a gap
    assert found.tiers == tuple(places[resident : resident + len(found.tiers)])
    assert set(places[resident + len(found.tiers) :]) <= {HOLE}
    assert not found.tiers or found.tiers[-1] != HOLE


def test_the_last_token_is_left_to_compute() -> None:
    cache = BlockCache(BLOCK, 100)
    cache.prefilled(request((1, 2), rest=0))
    assert cache.find(request((1, 2), rest=0)) == Found(BLOCK, ())
    assert cache.find(request((1, 2), rest=1)) == Found(2 * BLOCK, ())


def test_only_whole_blocks_are_kept() -> None:
    cache = BlockCache(BLOCK, 100)
    cache.prefilled(Request(0, 0.0, 2 * BLOCK - 1, blocks=(1, 2)))
    assert cache.find(request((1, 2))) == Found(BLOCK, ())


def test_a_hole_between_tiers_is_kept_and_one_at_the_end_is_not() -> None:
    cache = BlockCache(BLOCK, BLOCK, [BLOCK, None])
    for block in (3, 5, 1):
        cache.prefilled(request((block,)))
    assert cache.find(request((1, 9, 5, 3, 9))) == Found(BLOCK, (HOLE, 0, 1))
    assert cache.find(request((9, 9))) == Found(0, ())


def test_a_block_on_the_device_behind_a_gap_counts_as_in_the_fastest_tier() -> None:
    cache = BlockCache(BLOCK, BLOCK, [None, None])
    cache.prefilled(request((2,)))
    assert cache.find(request((1, 2))) == Found(0, (HOLE, 0))


def test_the_tail_goes_first_and_a_prompt_longer_than_the_device_leaves_its_front_there() -> None:
    cache = BlockCache(BLOCK, 2 * BLOCK)
    cache.prefilled(request((1, 2, 3)))
    assert cache.find(request((1, 2, 3))) == Found(2 * BLOCK, (0,))


def test_a_longer_prompt_pushes_none_of_its_own_front_into_the_tier() -> None:
    cache = BlockCache(BLOCK, 3 * BLOCK, [2 * BLOCK])
    for block in (7, 1, 8, 9):
        cache.prefilled(request((block,)))
    cache.prefilled(request((1, 4)))  # 1 was the oldest one on the device
    assert [place(cache, block) for block in (1, 4, 9)] == [None, None, None]
    assert [place(cache, block) for block in (7, 8)] == [0, 0]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 1), (2 * BLOCK - 1, 1), (2 * BLOCK, 2)])
def test_a_level_holds_whole_blocks_and_at_least_one(tokens: int, blocks: int) -> None:
    cache = BlockCache(BLOCK, tokens, [tokens])
    for block in range(6):
        cache.prefilled(request((block,)))
    places = [place(cache, block) for block in reversed(range(6))]
    assert places == [None] * blocks + [0] * blocks + [HOLE] * (6 - 2 * blocks)
