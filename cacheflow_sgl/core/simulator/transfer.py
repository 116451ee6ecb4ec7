"""KV moved between two pools by FlowKV (arXiv 2504.03775): so many calls, and then the bytes.

Paged pools are full of gaps, so what costs is the calls. A transfer takes calls * call_s + bytes /
rate. For 5,870 tokens of 32 layers in blocks of 16 FlowKV counts 23,469 calls where we count 32 * 2
* 367 = 23,488 (theirs is no multiple of 64, so perhaps an average over requests), and 1 aligned.

`CALL_S` follows from FlowKV's two average latencies, `NODE_BYTES_PER_S` is assumed. Nothing was
fitted to what they report of 12k tokens of Llama-3.1-8B (131,072 bytes a token) inside one node:

                  calls   here       published
    per block    48,000   1.8833 s   2.1894 s
    block-major     750   0.0909 s   slower than per block
    aligned           1   0.0625 s   0.0681 s

We are 14% and 8% below; 44.2 us a call and 23.1 GB/s would give theirs. That block-major alone is
slower than per block can't follow from calls and bytes: it has the same bytes in 64 times fewer
calls, so each of them, of 2 MiB, would have to take over 2.8 ms.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 16
"""Of FlowKV's figures."""


class TransferVariant(enum.StrEnum):
    """How KV lies in the pools, and what one call moves.

    `PER_BLOCK`: (layer, K|V, block); one layer of K or V of one block. `BLOCK_MAJOR`: (block,
    layer, K|V); one block. `ALIGNED`: the same, with segments aligned at both ends; one maximal
    common run of blocks.
    """

    PER_BLOCK = "per_block"
    BLOCK_MAJOR = "block_major"
    ALIGNED = "aligned"


@dataclass(frozen=True, slots=True)
class Run:
    """`pages` pages that follow one another both from `source` and from `destination` on."""

    source: int
    destination: int
    pages: int


def runs(source: Sequence[int], destination: Sequence[int]) -> list[Run]:
    """The maximal runs in which both page lists ascend by one together, in their order.

    Page `source[i]` goes to page `destination[i]`; one operation a run moves them all (FlowKV's
    bidirectional segment alignment). `ValueError` where the lists differ in length.
    """
    if len(source) != len(destination):
        raise ValueError(f"{len(source)} pages can't go to {len(destination)} pages: give as many")
    found: list[Run] = []
    first = 0
    for at in range(1, len(source) + 1):
        follows = at < len(source) and (
            source[at] - source[at - 1] == destination[at] - destination[at - 1] == 1
        )
        if not follows:
            found.append(Run(source[first], destination[first], at - first))
            first = at
    return found


def operations(
    variant: TransferVariant,
    tokens: int,
    *,
    layers: int,
    block_tokens: int = BLOCK_TOKENS,
    common_runs: int = 1,
) -> int:
    """Calls that move the KV of `tokens` tokens.

    Args:
        variant: what one call moves.
        tokens: from 1 up; a last block that isn't full is moved as one that is.
        layers: of the model.
        block_tokens: tokens of a block.
        common_runs: how many `runs` the blocks make, for `ALIGNED`; 1 is the best case.

    Raises:
        ValueError: no tokens, or more runs than blocks, or none.
    """
    blocks = _blocks(tokens, block_tokens)
    if not 1 <= common_runs <= blocks:
        raise ValueError(f"{blocks} blocks can't make {common_runs} runs: give 1 to {blocks}")
    if variant is TransferVariant.PER_BLOCK:
        return 2 * layers * blocks
    return blocks if variant is TransferVariant.BLOCK_MAJOR else common_runs


def transfer_s(
    variant: TransferVariant,
    tokens: int,
    *,
    layers: int,
    kv_bytes_per_token: int,
    link: float,
    call_s: float,
    block_tokens: int = BLOCK_TOKENS,
    common_runs: int = 1,
) -> float:
    """Seconds to move the KV of `tokens` tokens: calls * call_s + bytes / link.

    Args, beside those of `operations`:
        kv_bytes_per_token: bytes of KV of one token, all layers.
        link: bytes a second.
        call_s: seconds of a call beside its bytes.

    Raises:
        ValueError: as `operations`.
    """
    calls = operations(
        variant, tokens, layers=layers, block_tokens=block_tokens, common_runs=common_runs
    )
    nbytes = _blocks(tokens, block_tokens) * block_tokens * kv_bytes_per_token
    return calls * call_s + nbytes / link


def _blocks(tokens: int, block_tokens: int) -> int:
    if tokens < 1 or block_tokens < 1:
        raise ValueError(
            f"nothing to move: {tokens} tokens in blocks of {block_tokens}; give 1 or more of both"
        )
    return -(-tokens // block_tokens)


def _calibrated_call_s() -> float:
    """Between the averages of FlowKV's abstract only the calls differ, for its average request."""
    per_block_s, aligned_s = 0.944, 0.053
    calls = [
        operations(variant, 5870, layers=32)
        for variant in (TransferVariant.PER_BLOCK, TransferVariant.ALIGNED)
    ]
    return (per_block_s - aligned_s) / (calls[0] - calls[1])


CALL_S = _calibrated_call_s()
"""Seconds of a call, 37.9 us: calibrated on FlowKV's abstract, 5,870 tokens taken as its average
request."""

NODE_BYTES_PER_S = 25.2e9
"""Inside one node: PCIe 4 with 16 lanes, at the share that `core/roofline.py` assumes; calibrated
on nothing."""
