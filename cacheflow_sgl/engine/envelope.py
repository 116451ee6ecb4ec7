"""What two-pointer restores support; all else takes SGLang's own path.

Servers outside are told once, at start. Requests outside are counted by reason.
"""

from __future__ import annotations

import enum
from typing import Any


class Fallback(enum.StrEnum):
    """Why a request with a prefix on the host took SGLang's own path."""

    POLICY = "policy"
    """It was asked for (policy `sglang`)."""
    REQUEST_KIND = "request_kind"
    """Images, sessions, embeddings, beams: see `request_is_supported`."""
    SMALL_CHUNK = "small_chunk"
    """A step computes less than a page."""
    HOST_SPAN = "host_span"
    """The host's part is not one run of whole pages of the KV pool alone."""
    NO_MEMORY = "no_memory"
    """The device has no room for the tail."""


def unsupported_server(server_args: Any, cache: Any) -> str | None:
    """Why this server makes no two-pointer restores, in words; None where it does.

    Args:
        server_args: SGLang's resolved `ServerArgs`.
        cache: the `UnifiedRadixCache` with its HiCache set up.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    checks = {
        "tensor parallelism": server_args.tp_size > 1,
        "pipeline parallelism": server_args.pp_size > 1,
        "data-parallel attention": server_args.enable_dp_attention,
        "prefill/decode disaggregation": server_args.disaggregation_mode != "null",
        "speculative decoding": server_args.speculative_algorithm is not None,
        "LoRA": bool(server_args.enable_lora),
        "deterministic inference": server_args.enable_deterministic_inference,
        "a server without chunked prefill": (server_args.chunked_prefill_size or 0) <= 0,
        "the host as a buffer only": cache.buffer_pipeline is not None,
        "an external cache linker": cache.linker is not None,
        "the write_back policy": cache.is_write_back,
        "sliding-window, Mamba or hybrid models": tuple(cache.tree_components)
        != (ComponentType.FULL,),
        f"{type(pool).__name__} (MHA and GQA pools only)": type(pool) is not MHATokenToKVPool,
        "sidecar pools": bool(cache.sidecar_pool_specs),
        "a sharded KV pool": cache.token_to_kv_pool_allocator.page_size != cache.page_size,
        "unified memory": bool(getattr(server_args, "enable_unified_memory", False)),
    }
    return next((what for what, found in checks.items() if found), None)


def request_is_supported(req: Any) -> bool:
    """Whether SGLang's request `req` is a plain one: text in, tokens out, its KV kept."""
    return not (
        req.multimodal_inputs is not None
        or req.session is not None
        or req.input_embeds is not None
        or req.positional_embed_overrides is not None
        or req.token_indices_to_pool is not None
        or req.beam_group is not None
        or req.return_hidden_states
        or req.is_dllm()
        or req.return_routed_experts
        or req.skip_radix_cache_insert
        or req.swa_host_hit_length
        or req.mamba_host_hit_length
        or req.auxiliary_swa_host_hit_length
    )
