"""FlowKV's transfers: runs of pages, calls, seconds, and the figures that are derived from it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.roofline import GPUS, MODELS, modelled_profile
from cacheflow_sgl.core.simulator.transfer import (
    CALL_S,
    NODE_BYTES_PER_S,
    Run,
    TransferVariant,
    operations,
    runs,
    transfer_s,
)

PER_BLOCK, BLOCK_MAJOR, ALIGNED = TransferVariant


@st.composite
def page_lists(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two lists of one length, mostly ascending by one, with few pages so that runs touch."""
    steps = draw(st.lists(st.tuples(*[st.sampled_from([1, 1, 1, -1, 0, 2])] * 2), max_size=24))
    lists = []
    for side in (0, 1):
        pages = [draw(st.integers(0, 30))]
        for step in steps:
            pages.append(pages[-1] + step[side])
        lists.append(pages)
    return lists[0], lists[1]


@settings(deadline=None)
@given(page_lists())
@example(([], []))
def test_runs_cut_both_lists_in_order_into_maximal_runs(lists: tuple[list[int], list[int]]) -> None:
    source, destination = lists
    found = runs(source, destination)
    moved = [(run.source + i, run.destination + i) for run in found for i in range(run.pages)]
    assert moved == list(zip(source, destination, strict=True))
    for run, after in pairwise(found):
        ends = (run.source + run.pages, run.destination + run.pages)
        assert ends != (after.source, after.destination)
    assert all(run.pages > 0 for run in found)


def test_runs_end_where_either_list_jumps() -> None:
    assert runs([5, 6, 7, 8, 1], [0, 1, 4, 5, 6]) == [Run(5, 0, 2), Run(7, 4, 2), Run(1, 6, 1)]
    assert runs([3, 2, 1], [1, 2, 3]) == [Run(3, 1, 1), Run(2, 2, 1), Run(1, 3, 1)]


def test_runs_of_aligned_segments_are_one() -> None:
    assert runs(range(100, 467), range(367)) == [Run(100, 0, 367)]


def test_runs_need_a_destination_for_every_page() -> None:
    with pytest.raises(ValueError, match="2 pages can't go to 1 pages"):
        runs([1, 2], [1])


def test_operations_of_the_published_request() -> None:
    """23,469 are published for an average request of 5,870 tokens: less than 0.1% from ours."""
    counts = [operations(variant, 5870, layers=32) for variant in TransferVariant]
    assert counts == [32 * 2 * 367, 367, 1] == [23_488, 367, 1]
    assert counts[0] == pytest.approx(23_469, rel=1e-3)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 80), st.integers(1, 64), st.data())
def test_operations_from_the_blocks_themselves(
    tokens: int, layers: int, block_tokens: int, data: st.DataObject
) -> None:
    blocks = len(range(0, tokens, block_tokens))
    common = data.draw(st.integers(1, blocks))

    def count(variant: TransferVariant) -> int:
        return operations(
            variant, tokens, layers=layers, block_tokens=block_tokens, common_runs=common
        )

    assert count(PER_BLOCK) == sum(2 * layers for _ in range(blocks))
    assert count(BLOCK_MAJOR) == blocks
    assert count(ALIGNED) == common
    assert count(ALIGNED) <= count(BLOCK_MAJOR) < count(PER_BLOCK)


@pytest.mark.parametrize(
    ("tokens", "block_tokens", "common_runs", "said"),
    [
        (0, 16, 1, "nothing to move"),
        (16, 0, 1, "nothing to move"),
        (32, 16, 3, "2 blocks can't make 3 runs"),
        (32, 16, 0, "2 blocks can't make 0 runs"),
    ],
)
def test_impossible_transfers_are_refused(
    tokens: int, block_tokens: int, common_runs: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        operations(ALIGNED, tokens, layers=32, block_tokens=block_tokens, common_runs=common_runs)


def test_seconds_are_calls_and_whole_blocks() -> None:
    def seconds(
        variant: TransferVariant, call_s: float, link: float, common_runs: int = 1
    ) -> float:
        return transfer_s(
            variant,
            17,
            layers=3,
            kv_bytes_per_token=100,
            link=link,
            call_s=call_s,
            common_runs=common_runs,
        )

    assert seconds(PER_BLOCK, 0.5, 3200.0) == 12 * 0.5 + 1
    assert seconds(BLOCK_MAJOR, 0.5, 1600.0) == 2 * 0.5 + 2
    assert seconds(ALIGNED, 0.5, 3200.0) == 0.5 + 1
    assert seconds(ALIGNED, 0.5, 3200.0, common_runs=2) == seconds(BLOCK_MAJOR, 0.5, 3200.0)
    assert len({seconds(variant, 0.0, 10.0) for variant in TransferVariant}) == 1  # bytes are bytes


def _node_s(variant: TransferVariant, tokens: int) -> float:
    return transfer_s(
        variant,
        tokens,
        layers=32,
        kv_bytes_per_token=MODELS["llama-3.1-8b"].kv_bytes_per_token,
        link=NODE_BYTES_PER_S,
        call_s=CALL_S,
    )


def test_the_call_is_calibrated_on_the_averages_of_the_abstract_alone() -> None:
    assert round(CALL_S * 1e6, 2) == 37.94
    saved_s = _node_s(PER_BLOCK, 5870) - _node_s(ALIGNED, 5870)
    assert saved_s == pytest.approx(0.944 - 0.053)


def test_the_link_is_that_of_the_modelled_profiles() -> None:
    profile = modelled_profile(GPUS["a100"], MODELS["qwen3-8b"], command="", date="", versions={})
    assert profile.tiers[0].bytes_per_s == pytest.approx(NODE_BYTES_PER_S)


def test_figures_of_12k_tokens_are_those_of_the_module_docstring() -> None:
    assert operations(PER_BLOCK, 12_000, layers=32) == 48_000
    assert _node_s(PER_BLOCK, 12_000) == pytest.approx(1.8833, abs=5e-5)
    assert _node_s(BLOCK_MAJOR, 12_000) == pytest.approx(0.0909, abs=5e-5)
    assert _node_s(ALIGNED, 12_000) == pytest.approx(0.0625, abs=5e-5)
