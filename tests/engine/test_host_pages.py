"""A page's bytes are in record order, whatever the layout of the host pool."""

import numpy as np
import pytest
import torch

from cacheflow_sgl.engine.host_pages import OpaquePages, StridedPages, host_pages

pytestmark = pytest.mark.engine

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e5m2)


@pytest.fixture(scope="module")
def pools():
    from tests.engine import host_pools

    return host_pools


def rows(pool, layer: int, slot: int) -> list[torch.Tensor]:
    """K and V (or the latent) of one token in one layer, read as SGLang's kernels do."""
    if pool.layout == "page_head":
        page, token = divmod(slot, pool.page_size)
        return [buffer[page, :, token, layer] for buffer in (pool.k_buffer, pool.v_buffer)]
    if not hasattr(pool, "k_data_refs"):
        if pool.layout == "page_first_direct":
            return [pool.kv_buffer[slot // pool.page_size, layer, slot % pool.page_size]]
        return [pool.data_refs[layer][slot]]
    refs = [pool.k_data_refs[layer], pool.v_data_refs[layer]]
    if pool.layout == "page_first_direct":
        return [ref[slot // pool.page_size, slot % pool.page_size] for ref in refs]
    return [ref[slot] for ref in refs]


def record(pool, slot: int) -> bytes:
    """The record (layer, K|V, token, head, dim) of a page, the slow way."""
    raw = b""
    for layer in range(pool.layer_num):
        tokens = [rows(pool, layer, slot + token) for token in range(pool.page_size)]
        for part in range(len(tokens[0])):
            for token in tokens:
                raw += token[part].contiguous().view(torch.uint8).numpy().tobytes()
    return raw


def taken(pages, slot: int) -> bytes:
    (parts,) = pages.sources([slot])
    layers = pages.layout.layers
    return b"".join(part[layer].tobytes() for layer in range(layers) for part in parts)


def build(pools, kind: str, layout: str, dtype: torch.dtype):
    if kind == "mla":
        return pools.mla_pool(layout, dtype)
    return pools.mha_pool(layout, dtype, v_dim=6 if kind == "asymmetric" else pools.DIM)


CASES = [
    *[("mha", layout, dtype) for layout in MHA_LAYOUTS for dtype in DTYPES],
    *[("mla", layout, dtype) for layout in MLA_LAYOUTS for dtype in DTYPES],
    *[("asymmetric", layout, torch.bfloat16) for layout in ("page_first", "page_first_direct")],
]


@pytest.mark.parametrize(("kind", "layout", "dtype"), CASES)
def test_record_order_of_every_layout(pools, kind, layout, dtype):
    pool = build(pools, kind, layout, dtype)
    pools.fill_randomly(pool)
    pages = host_pages(pool)
    assert isinstance(pages, StridedPages)
    for slot in (0, 2 * pools.PAGE, 15 * pools.PAGE):
        assert taken(pages, slot) == record(pool, slot)
    assert pages.layout.payload_bytes == len(record(pool, 0)) == pool.size_per_token * pools.PAGE


@pytest.mark.parametrize("target", MHA_LAYOUTS)
@pytest.mark.parametrize("source", MHA_LAYOUTS)
def test_a_page_of_one_layout_loads_into_another(pools, source, target):
    old, new = pools.mha_pool(source), pools.mha_pool(target)
    pools.fill_randomly(old)
    slots = [4 * pools.PAGE, 0]
    before = record(new, pools.PAGE)
    targets = host_pages(new).targets(slots)
    for sources, destination in zip(host_pages(old).sources(slots), targets, strict=True):
        for part, place in zip(sources, destination, strict=True):
            np.copyto(place, part)
    host_pages(new).landed(slots, targets, [True, True])
    assert [record(new, slot) for slot in slots] == [record(old, slot) for slot in slots]
    assert record(new, pools.PAGE) == before


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_opaque_pages_round_trip_and_a_miss_changes_nothing(pools, layout):
    pool = pools.mha_pool(layout)
    pools.fill_randomly(pool)
    pages = OpaquePages(pool)
    slots = [0, 3 * pools.PAGE]
    wanted = [record(pool, slot) for slot in slots]
    stored = [parts[0].copy() for parts in pages.sources(slots)]
    pools.fill_randomly(pool, seed=1)
    missed = record(pool, slots[1])
    targets = pages.targets(slots)
    for (place,), data in zip(targets, stored, strict=True):
        np.copyto(place, data)
    pages.landed(slots, targets, [True, False])
    assert record(pool, slots[0]) == wanted[0]
    assert record(pool, slots[1]) == missed


def test_an_unknown_kind_of_pool_is_taken_as_opaque(pools):
    class Packed(pools.MHATokenToKVPoolHost):
        """Stands for SGLang's subclasses that keep more than the two buffers."""

    pool = pools.mha_pool("layer_first")
    pool.__class__ = Packed
    assert isinstance(host_pages(pool), OpaquePages)
