"""From a recorded trace to simulated requests: lengths, blocks, and who follows whom."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cacheflow_sgl.core.simulator.requests import Request
from cacheflow_sgl.replay import trace as recorded
from cacheflow_sgl.replay.prompts import BLOCK_TOKENS, BlockPrompt, Prompt, TextPrompt

BYTES_PER_TOKEN = 4
"""Estimated, of text."""

Arrival = Literal["trace", "closed"]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request of a trace; `before` is the index of the turn before it."""

    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    before: int | None


def holds_text(trace: recorded.Trace) -> bool:
    """Whether lengths of prompts must be estimated."""
    return any(_is_text(request.prompt) for request in trace.requests())


def requests_of(
    trace: recorded.Trace, arrival: Arrival = "trace", speed: float = 1
) -> list[Request]:
    """The requests of a trace, in order of arrival.

    A prompt of hash ids has its exact length and blocks; one of text is taken to have a token per
    `BYTES_PER_TOKEN` bytes. A reply is as long as the trace says, or as its text, or one token.

    Args:
        trace: as loaded.
        arrival: `trace`: at the trace's times, a turn without one when the turn before it has
            ended. `closed`: every turn when the one before it has ended, first turns at the
            trace's times. Mooncake names no sessions there: a request follows the latest one whose
            full blocks it starts with.
        speed: arrival times pass so much faster.
    """
    turns = list(_turns(trace))
    if arrival == "closed":
        turns = _chained(turns)
    order = sorted(range(len(turns)), key=lambda index: turns[index].arrival_s or 0.0)
    rids = {index: rid for rid, index in enumerate(order)}
    return [_request(rids, index, turns[index], arrival, speed) for index in order]


def _request(
    rids: dict[int, int], index: int, turn: _Turn, arrival: Arrival, speed: float
) -> Request:
    follows = turn.before is not None and (arrival == "closed" or turn.arrival_s is None)
    return Request(
        rid=rids[index],
        at_s=0.0 if follows else (turn.arrival_s or 0.0) / speed,
        prompt_tokens=turn.prompt_tokens,
        output_tokens=turn.output_tokens,
        blocks=turn.blocks,
        after=rids[turn.before] if follows and turn.before is not None else None,
    )


def _turns(trace: recorded.Trace) -> Iterator[_Turn]:
    index = 0
    for session in trace.sessions:
        for number, request in enumerate(session.requests):
            tokens, blocks = _blocks(request.prompt)
            output = request.max_new_tokens or _reply_tokens(request.prompt)
            before = index - 1 if number else None
            yield _Turn(request.arrival_s, tokens, output, blocks, before)
            index += 1


def _chained(turns: Sequence[_Turn]) -> list[_Turn]:
    """With a turn before each whose blocks go on from an earlier one's, where none was named."""
    tips: dict[int, int] = {}
    """Chain hash of the full blocks of a last turn -> its index."""
    chained = []
    for index, turn in enumerate(turns):
        before = turn.before
        chains = _chain(turn.blocks[: turn.prompt_tokens // BLOCK_TOKENS])
        if before is None:
            tip = next((chain for chain in reversed(chains[:-1]) if chain in tips), None)
            before = None if tip is None else tips.pop(tip)
        if chains:
            tips[chains[-1]] = index
        chained.append(
            _Turn(turn.arrival_s, turn.prompt_tokens, turn.output_tokens, turn.blocks, before)
        )
    return chained


def _chain(blocks: Sequence[int]) -> list[int]:
    """A hash of each run of blocks from the front."""
    chain, chains = 0, []
    for block in blocks:
        chain = hash((chain, block))
        chains.append(chain)
    return chains


def _blocks(prompt: Prompt) -> tuple[int, tuple[int, ...]]:
    """Tokens of a prompt, and ids of its blocks that are equal where prefixes are."""
    if isinstance(prompt, BlockPrompt):
        return prompt.length, prompt.hash_ids
    if isinstance(prompt, TextPrompt):
        return _hashed(prompt.text().encode(errors="surrogatepass"), BYTES_PER_TOKEN)
    if isinstance(prompt.content, str):
        return _hashed(prompt.content.encode(errors="surrogatepass"), BYTES_PER_TOKEN)
    return _hashed(np.array(prompt.content, dtype="<i8").tobytes(), 8)


def _hashed(data: bytes, bytes_per_token: int) -> tuple[int, tuple[int, ...]]:
    size = BLOCK_TOKENS * bytes_per_token
    running = hashlib.blake2b(digest_size=8)
    blocks = []
    for start in range(0, len(data) - size + 1, size):
        running.update(data[start : start + size])
        blocks.append(int.from_bytes(running.copy().digest(), "little"))
    return max(len(data) // bytes_per_token, 1), tuple(blocks)


def _is_text(prompt: Prompt) -> bool:
    if isinstance(prompt, BlockPrompt):
        return False
    return isinstance(prompt, TextPrompt) or isinstance(prompt.content, str)


def _reply_tokens(prompt: Prompt) -> int:
    if not isinstance(prompt, TextPrompt) or prompt.count == len(prompt.messages):
        return 1
    text = prompt.messages[prompt.count].text
    return max(len(text.encode(errors="surrogatepass")) // BYTES_PER_TOKEN, 1)
