"""Real SGLang host pools, small, without a device."""

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
)
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLABufferInfo, MLATokenToKVPoolHost

LAYERS, HEADS, DIM, PAGE, SLOTS = 3, 2, 4, 4, 32


def mha_pool(layout: str, dtype: torch.dtype = torch.bfloat16, v_dim: int = DIM):
    def layers(dim):
        return tuple(torch.zeros(SLOTS, HEADS, dim, dtype=dtype) for _ in range(LAYERS))

    k, v = layers(DIM), layers(v_dim)
    pointers = [torch.tensor([t.data_ptr() for t in side], dtype=torch.uint64) for side in (k, v)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=v_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    cls = MHATokenToKVPoolHost if v_dim == DIM else AsymmetricMHATokenToKVPoolHost
    return cls(
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=SLOTS,
        start_layer=0,
        end_layer=LAYERS,
    )


def mla_pool(layout: str, dtype: torch.dtype = torch.bfloat16):
    buffers = tuple(torch.zeros(SLOTS, 1, DIM + 2, dtype=dtype) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=torch.tensor([t.data_ptr() for t in buffers], dtype=torch.uint64),
        page_size=PAGE,
        kv_lora_rank=DIM,
        qk_rope_head_dim=2,
        kv_cache_dim=DIM + 2,
        dtype=dtype,
        device=torch.device("cpu"),
        device_layer_num=LAYERS,
        layer_indices=tuple(range(LAYERS)),
    )
    return MLATokenToKVPoolHost(
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=SLOTS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def mamba_pool(layout: str):
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, SLOTS, HEADS, DIM),
        conv=(torch.zeros(LAYERS, SLOTS, 5, dtype=torch.bfloat16),),
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=SLOTS, pin_memory=False, layout=layout)


def fill_randomly(pool, seed: int = 0) -> None:
    held = pool.kv_buffer
    buffers = held if isinstance(held, tuple | list) else (held,)
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers:
        raw = torch.randint(0, 256, buffer.view(torch.uint8).shape, generator=generator)
        buffer.view(torch.uint8).copy_(raw)
