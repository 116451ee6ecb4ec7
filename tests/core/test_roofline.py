"""The roofline: its four public points, what it counts, and the files that it made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cacheflow_sgl.core.profiles import TableCost, load_profile
from cacheflow_sgl.core.roofline import (
    CALIBRATION,
    CALIBRATION_MODEL,
    GPUS,
    MODELS,
    decode_cost,
    forward_s,
    modelled_profile,
)

PROFILES = Path(__file__).parents[2] / "profiles"
NOTHING = {"command": "", "date": "", "versions": {}}
PAIRS = [(gpu, model) for gpu in GPUS for model in MODELS]


@pytest.mark.parametrize("gpu", CALIBRATION)
def test_the_public_points_come_out(gpu: str):
    """Cake, arXiv 2410.03065: chunk 0 and chunk 63 of 512 tokens, 0.5 MB of KV a token."""
    public = {"a100": (0.0388, 0.1120), "h100": (0.0274, 0.0935)}[gpu]
    assert CALIBRATION[gpu] == public
    assert CALIBRATION_MODEL.kv_bytes_per_token == 524288
    for chunk, seconds in zip((0, 63), public, strict=True):
        modelled = forward_s(GPUS[gpu], CALIBRATION_MODEL, 512 * chunk, 512, 32)
        assert modelled == pytest.approx(seconds, rel=0.03)


def test_a_gpu_without_a_public_point_has_the_fractions_of_its_kin():
    for gpu, kin in (("l40s", "a100"), ("h200", "h100")):
        assert GPUS[gpu].linear_fraction == GPUS[kin].linear_fraction
        assert GPUS[gpu].attention_fraction == GPUS[kin].attention_fraction
    assert len({(gpu.fixed_s, gpu.memory_fraction) for gpu in GPUS.values()}) == 1


@pytest.mark.parametrize(
    ("model", "kv_bytes", "boundary_bytes", "weights"),
    [
        ("qwen3-8b", 147456, 16384, 8.19e9),
        ("llama-3.1-8b", 131072, 16384, 8.03e9),
        ("qwen3-30b-a3b", 98304, 8192, 30.5e9),
    ],
)
def test_sizes_are_those_published(model, kv_bytes, boundary_bytes, weights):
    shape = MODELS[model]
    assert shape.kv_bytes_per_token == kv_bytes
    assert shape.boundary_bytes_per_token == boundary_bytes
    assert shape.weight_bytes / 2 == pytest.approx(weights, rel=0.01)


def test_flops_are_two_for_each_active_weight_and_row():
    """Published non-embedding parameters: 6.95e9 of Qwen3-8B; of 30B-A3B 2.7e9 are active."""
    for model, active in (("qwen3-8b", 6.95e9), ("qwen3-30b-a3b", 2.7e9)):
        shape = MODELS[model]
        assert shape.layers * shape.linear_flops(100) / 200 == pytest.approx(active, rel=0.02)


def test_attention_counts_each_pair_of_a_row_and_a_token_it_sees():
    shape = CALIBRATION_MODEL
    pairs = sum(start + 1 for start in range(700, 700 + 30))
    assert shape.attention_flops(700, 30) == 4 * 4096 * pairs


def test_of_experts_those_are_read_that_rows_touch():
    shape = MODELS["qwen3-30b-a3b"]
    expert_bytes = 3 * 2048 * 768 * 2
    idle, one, few, many = (shape.read_bytes(rows) for rows in (0, 1, 4, 4096))
    assert one - idle == pytest.approx(8 * expert_bytes)
    assert one < few < one + 3 * 8 * expert_bytes  # some are shared
    assert many - idle == pytest.approx(128 * expert_bytes)
    dense = MODELS["qwen3-8b"]
    assert dense.read_bytes(1) == dense.read_bytes(4096)


def test_short_forwards_take_the_reading_of_weights_and_long_ones_the_flops():
    gpu, model = replace(GPUS["h100"], fixed_s=0.0), MODELS["qwen3-8b"]
    read_s = 36 * model.read_bytes(1) / (3350e9 * 0.8)
    assert forward_s(gpu, model, 0, 1, 36) == pytest.approx(read_s, rel=0.001)
    flops_s = 36 * model.linear_flops(2048) / (989e12 * gpu.linear_fraction)
    attention_s = 36 * model.attention_flops(0, 2048) / (989e12 * gpu.attention_fraction)
    assert forward_s(gpu, model, 0, 2048, 36) == pytest.approx(flops_s + attention_s)


def test_layers_cost_their_share_of_all_but_the_fixed_time():
    gpu, model = GPUS["a100"], MODELS["llama-3.1-8b"]
    layers_s = forward_s(gpu, model, 5000, 512, 32) - gpu.fixed_s
    assert forward_s(gpu, model, 5000, 512, 8) == pytest.approx(gpu.fixed_s + layers_s / 4)


def test_a_decode_step_reads_weights_output_head_and_kv():
    gpu, model = replace(GPUS["h100"], fixed_s=0.0), MODELS["llama-3.1-8b"]
    embedding_bytes = 2 * 128256 * 4096
    read = decode_cost(gpu, model)
    assert read.base_s * 3350e9 * 0.8 == pytest.approx(model.weight_bytes - embedding_bytes)
    assert read.per_context_token_s * 3350e9 * 0.8 == pytest.approx(131072)


def test_weights_that_do_not_fit_are_told():
    told = {
        pair
        for pair in PAIRS
        if "don't fit" in modelled_profile(GPUS[pair[0]], MODELS[pair[1]], **NOTHING).method
    }
    assert told == {("l40s", "qwen3-30b-a3b")}


@pytest.mark.parametrize(("gpu", "model"), [("h100", "qwen3-8b"), ("l40s", "qwen3-30b-a3b")])
def test_the_table_follows_the_roofline_between_its_entries(gpu, model):
    shape = MODELS[model]
    cost = TableCost(modelled_profile(GPUS[gpu], shape, **NOTHING))
    for start, rows, layers in ((0, 512, 1), (777, 512, 7), (20000, 100, 30), (250000, 10000, 36)):
        exact = forward_s(GPUS[gpu], shape, start, rows, layers)
        assert cost.seconds(start, rows, layers) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(("gpu", "model"), PAIRS)
def test_the_files_are_what_the_roofline_gives(gpu: str, model: str):
    filed = load_profile(PROFILES / f"{gpu}-{model}.json")
    fresh = modelled_profile(
        GPUS[gpu],
        MODELS[model],
        command=filed.command,
        date=filed.date,
        versions=filed.versions,
    )
    assert filed == fresh, "write them anew: cacheflow profile model --all profiles"
    assert filed.source == "modelled"
