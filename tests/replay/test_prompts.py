"""Equal hash ids give equal tokens, shared prefixes stay shared, turns extend one another."""

import string
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow_sgl.replay.prompts import (
    Alphabet,
    BlockPrompt,
    Message,
    TextPrompt,
)

ALPHABET = Alphabet(range(1000, 5000))
ids = st.lists(st.integers(0, 6), min_size=1, max_size=6)


def prompt_of(hash_ids: list[int], last: int, block: int = 16) -> BlockPrompt:
    return BlockPrompt(tuple(hash_ids), (len(hash_ids) - 1) * block + last, block)


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(ids, ids, st.integers(1, 16), st.integers(1, 16), st.sampled_from([0.25, 0.5, 1.0, 3.0]))
def test_prompts_share_exactly_the_blocks_their_ids_share(
    first: list[int], second: list[int], last_a: int, last_b: int, scale: float
) -> None:
    a, b = (prompt_of(x, n).scaled(scale) for x, n in ((first, last_a), (second, last_b)))
    blocks = common(first, second)
    expected = min(blocks * a.block_tokens, a.length, b.length)
    shared = common(a.token_ids(ALPHABET, 0), b.token_ids(ALPHABET, 0))
    assert shared >= expected
    # Two different blocks of 4000 possible ids rarely begin alike, and never go on so.
    assert shared <= expected + 3


@given(ids, st.integers(1, 16), st.floats(0.05, 8))
def test_scaling_keeps_the_invariant_of_a_block_prompt(
    hash_ids: list[int], last: int, scale: float
) -> None:
    scaled = prompt_of(hash_ids, last).scaled(scale)
    assert scaled.block_tokens == max(1, round(16 * scale))
    full = (len(hash_ids) - 1) * scaled.block_tokens
    assert full < scaled.length <= full + scaled.block_tokens
    assert len(scaled.token_ids(ALPHABET, 0)) == scaled.length


@given(ids, st.integers(1, 16), st.integers(1, 120))
def test_clipping_keeps_the_front(hash_ids: list[int], last: int, most: int) -> None:
    prompt = prompt_of(hash_ids, last)
    assert prompt.clipped(most).token_ids(ALPHABET, 0) == prompt.token_ids(ALPHABET, 0)[:most]


def test_tokens_are_the_same_on_every_machine_and_differ_by_seed() -> None:
    prompt = prompt_of([7], 6)
    assert prompt.token_ids(ALPHABET, 0) == PINNED
    assert prompt.token_ids(ALPHABET, 1) != PINNED


# SHAKE-128 of "0:7", four bytes a token, little endian, modulo 4000, plus 1000.
PINNED = [4675, 3780, 3048, 2580, 2539, 1775]


@given(ids, st.sets(st.integers(0, 200_000), min_size=2, max_size=50), st.integers(0, 9))
def test_tokens_come_from_the_alphabet(hash_ids: list[int], valid: set[int], seed: int) -> None:
    assert set(prompt_of(hash_ids, 16).token_ids(Alphabet(valid), seed)) <= valid


@pytest.mark.parametrize("vocab_size", [2, 3, 256, 151_936])
def test_alphabet_of_a_vocabulary_is_valid(vocab_size: int) -> None:
    valid = Alphabet.of_vocabulary(vocab_size).ids
    assert valid.min() >= 0
    assert valid.max() < vocab_size


def test_alphabet_of_a_vocabulary_keeps_off_both_ends() -> None:
    valid = Alphabet.of_vocabulary(32_000).ids
    assert valid.min() > 255
    assert valid.max() < 31_000


messages = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text(max_size=20)),
    min_size=2,
    max_size=8,
)


@given(messages, st.text(string.ascii_letters, max_size=20))
def test_a_turn_extends_the_turn_before(pairs: list[tuple[str, str]], context: str) -> None:
    history = tuple(Message(role, text, reply=role == "assistant") for role, text in pairs)
    counts = [i for i, m in enumerate(history) if m.reply]
    texts = [TextPrompt(history, n, context).text() for n in counts]
    for before, after in pairwise(texts):
        assert after.startswith(before)
        assert len(after) > len(before)
    assert all(text.startswith(context) for text in texts)
