"""Which servers and requests get two-pointer restores."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cacheflow_sgl.engine.envelope import Fallback, request_is_supported, unsupported_server

pytestmark = pytest.mark.engine


@pytest.fixture
def server(make_stand):
    """Arguments and cache of a server that is supported, to be spoiled one by one."""
    from sglang.srt.server_args import ServerArgs

    cache = make_stand().cache
    real = ServerArgs(model_path="dummy", chunked_prefill_size=128)
    names = (
        "tp_size",
        "pp_size",
        "enable_dp_attention",
        "disaggregation_mode",
        "speculative_algorithm",
        "enable_lora",
        "enable_deterministic_inference",
        "chunked_prefill_size",
    )
    args = SimpleNamespace(**{name: getattr(real, name) for name in names})
    facts = (
        "token_to_kv_pool_allocator",
        "buffer_pipeline",
        "linker",
        "is_write_back",
        "tree_components",
        "sidecar_pool_specs",
        "page_size",
    )
    return args, SimpleNamespace(**{name: getattr(cache, name) for name in facts})


def test_a_plain_server_is_supported(server):
    assert unsupported_server(*server) is None


@pytest.mark.parametrize(
    ("argument", "value", "reason"),
    [
        ("tp_size", 2, "tensor parallelism"),
        ("pp_size", 2, "pipeline parallelism"),
        ("enable_dp_attention", True, "data-parallel attention"),
        ("disaggregation_mode", "prefill", "prefill/decode disaggregation"),
        ("disaggregation_mode", "decode", "prefill/decode disaggregation"),
        ("speculative_algorithm", "EAGLE", "speculative decoding"),
        ("enable_lora", True, "LoRA"),
        ("enable_deterministic_inference", True, "deterministic inference"),
        ("chunked_prefill_size", -1, "a server without chunked prefill"),
        ("chunked_prefill_size", 0, "a server without chunked prefill"),
        ("chunked_prefill_size", None, "a server without chunked prefill"),
        ("enable_unified_memory", True, "unified memory"),
    ],
)
def test_servers_by_their_arguments(server, argument, value, reason):
    args, cache = server
    setattr(args, argument, value)
    assert unsupported_server(args, cache) == reason


@pytest.mark.parametrize(
    ("fact", "value", "reason"),
    [
        ("buffer_pipeline", object(), "the host as a buffer only"),
        ("linker", object(), "an external cache linker"),
        ("is_write_back", True, "the write_back policy"),
        ("sidecar_pool_specs", [object()], "sidecar pools"),
        ("page_size", 8, "a sharded KV pool"),
    ],
)
def test_servers_by_their_cache(server, fact, value, reason):
    args, cache = server
    setattr(cache, fact, value)
    assert unsupported_server(args, cache) == reason


@pytest.mark.parametrize("added", ["SWA", "MAMBA"])
def test_hybrid_models(server, added):
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    args, cache = server
    cache.tree_components = (ComponentType.FULL, ComponentType[added])
    assert unsupported_server(args, cache) == "sliding-window, Mamba or hybrid models"


def test_other_pools_are_named(server):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class QuantisedPool(MHATokenToKVPool):
        def __init__(self):
            pass

    args, cache = server
    cache.token_to_kv_pool_allocator = SimpleNamespace(page_size=16, get_kvcache=QuantisedPool)
    assert unsupported_server(args, cache) == "QuantisedPool (MHA and GQA pools only)"


# -- requests


def test_a_plain_request_is_supported(make_stand):
    stand = make_stand()
    assert request_is_supported(stand.request(stand.tokens(1, 40)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("multimodal_inputs", object()),
        ("session", object()),
        ("input_embeds", [[0.0]]),
        ("positional_embed_overrides", object()),
        ("token_indices_to_pool", [0]),
        ("beam_group", object()),
        ("return_hidden_states", True),
        ("dllm_config", object()),
        ("return_routed_experts", True),
        ("dllm_config", object()),
        ("skip_radix_cache_insert", True),
        ("swa_host_hit_length", 16),
        ("mamba_host_hit_length", 16),
        ("staged_prefetch_plan", SimpleNamespace(window_tokens=lambda kind: 16)),
    ],
)
def test_requests_of_another_kind_are_not(make_stand, field, value):
    stand = make_stand()
    req = stand.request(stand.tokens(1, 40))
    assert hasattr(req, field), "SGLang calls it something else now"
    setattr(req, field, value)
    assert not request_is_supported(req)


def test_fallbacks_are_words_for_metrics():
    assert all(reason.value.isidentifier() and reason.value.islower() for reason in Fallback)
