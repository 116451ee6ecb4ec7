"""The storage backend over real host pools and a real disk store, without a server."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.engine.namespace import new_run_id
from tests.engine.test_namespace import model

pytestmark = pytest.mark.engine

KEYS = [f"{i:064x}" for i in range(16)]


@pytest.fixture(scope="module")
def sgl():
    """SGLang's classes and our backend, imported once."""
    from sglang.srt.mem_cache import hicache_storage

    from cacheflow_sgl.engine import storage
    from tests.engine import host_pools

    return SimpleNamespace(hicache=hicache_storage, storage=storage, pools=host_pools)


@pytest.fixture
def make(sgl, tmp_path, monkeypatch):
    """Build a backend on one directory; `rank` and options may differ from call to call."""
    served = model(tmp_path / "nowhere")
    monkeypatch.setattr(sgl.storage, "get_model", lambda: served)
    spec = SimpleNamespace(speculative_draft_model_path=None)
    monkeypatch.setattr(sgl.storage, "get_spec", lambda: spec)
    monkeypatch.setattr(sgl.storage, "get_lora", lambda: SimpleNamespace(lora_paths=None))
    new_run_id()
    opened = []

    def build(pool, rank=0, ranks=1, mla=False, **options):
        options = {"directory": str(tmp_path / "kv"), "capacity": "1GB"} | options
        config = sgl.hicache.HiCacheStorageConfig(
            tp_rank=rank,
            tp_size=ranks,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=mla,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name="m",
            extra_config=options,
        )
        backend = sgl.storage.CacheFlowStorage(config, pool)
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, sgl.hicache.PoolName.KV)
        opened.append(backend)
        return backend

    yield build
    for backend in opened:
        backend.close()


def slots(pool, pages) -> torch.Tensor:
    """Host slots of the pages numbered `pages`."""
    size = pool.page_size
    starts = torch.tensor(list(pages), dtype=torch.int64) * size
    return (starts[:, None] + torch.arange(size)).flatten()


def page_bytes(pool, page: int) -> bytes:
    data = pool.get_data_page(page * pool.page_size)
    return data.contiguous().view(torch.uint8).numpy().tobytes()


LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_into_other_slots(sgl, make, layout):
    pool = sgl.pools.mha_pool(layout)
    sgl.pools.fill_randomly(pool)
    backend = make(pool)
    stored = [page_bytes(pool, page) for page in range(4)]
    assert backend.batch_exists(KEYS[:4]) == 0
    assert backend.batch_set_v1(KEYS[:4], slots(pool, range(4))) == [True] * 4
    assert backend.batch_exists(KEYS[:6]) == 4
    assert backend.exists(KEYS[3])
    assert not backend.exists(KEYS[4])
    untouched = page_bytes(pool, 8)
    assert (
        backend.batch_get_v1(KEYS[:6], slots(pool, [7, 6, 5, 4, 9, 10])) == [True] * 4 + [False] * 2
    )
    assert [page_bytes(pool, page) for page in (7, 6, 5, 4)] == stored
    assert page_bytes(pool, 8) == untouched


@pytest.mark.parametrize("layout", ("layer_first", "page_first", "page_first_direct"))
def test_mla_ranks_share_pages_and_mha_ranks_do_not(sgl, make, layout):
    latent = sgl.pools.mla_pool(layout)
    sgl.pools.fill_randomly(latent)
    assert make(latent, 0, 2, mla=True).batch_set_v1(KEYS[:1], slots(latent, [0])) == [True]
    assert make(latent, 1, 2, mla=True).batch_exists(KEYS[:1]) == 1
    heads = sgl.pools.mha_pool(layout)
    assert make(heads, 0, 2).batch_set_v1(KEYS[:1], slots(heads, [0])) == [True]
    assert make(heads, 1, 2).batch_exists(KEYS[:1]) == 0


def test_a_draft_model_with_heads_is_apart_on_each_rank_of_an_mla_model(sgl, make):
    latent, heads = sgl.pools.mla_pool("layer_first"), sgl.pools.mha_pool("layer_first")
    move = [transfer(sgl, sgl.hicache.PoolName.DRAFT, heads, [0])]
    ranks = [make(latent, rank, 2, mla=True) for rank in (0, 1)]
    for backend in ranks:
        backend.register_mem_host_pool_v2(heads, sgl.hicache.PoolName.DRAFT)
    assert ranks[0].batch_set_v2(move) == {sgl.hicache.PoolName.DRAFT: [True]}
    assert ranks[1].batch_get_v2(move) == {sgl.hicache.PoolName.DRAFT: [False]}


def test_every_rank_backs_up_what_it_holds_alone(sgl):
    from cacheflow_sgl.engine.backend_name import back_up_own_shard

    names = sgl.hicache.PoolName
    pools = {
        names.DRAFT: sgl.pools.mha_pool("layer_first"),
        names.INDEXER: sgl.pools.mla_pool("layer_first"),
    }
    entries = {name: SimpleNamespace(host_pool=pool) for name, pool in pools.items()}
    controller = SimpleNamespace(
        storage_backend_type="cacheflow", mem_pool_host=SimpleNamespace(entry_map=entries)
    )

    def backs_up(name) -> bool:
        never = lambda _controller, _transfer: False  # noqa: E731
        return back_up_own_shard(never, controller, sgl.hicache.PoolTransfer(name=name))

    assert backs_up(names.DRAFT)
    assert not backs_up(names.INDEXER)
    assert not backs_up(names.SWA)
    controller.storage_backend_type = "file"
    assert not backs_up(names.DRAFT)


def test_a_restart_under_another_host_layout_finds_the_pages(sgl, make):
    old, new = sgl.pools.mha_pool("layer_first"), sgl.pools.mha_pool("page_first")
    sgl.pools.fill_randomly(old)
    first = make(old)
    first.batch_set_v1(KEYS[:2], slots(old, [0, 1]))
    first.close()
    assert make(new).batch_get_v1(KEYS[:2], slots(new, [3, 4])) == [True, True]
    for layer in range(sgl.pools.LAYERS):
        moved = new.k_data_refs[layer][3 * sgl.pools.PAGE : 5 * sgl.pools.PAGE]
        assert torch.equal(moved.view(torch.uint8), old.k_data_refs[layer][:8].view(torch.uint8))


def test_another_page_size_dtype_or_tag_is_another_namespace(sgl, make):
    pool = sgl.pools.mha_pool("layer_first", torch.bfloat16)
    make(pool).batch_set_v1(KEYS[:1], slots(pool, [0]))
    assert make(pool).batch_exists(KEYS[:1]) == 1
    assert make(sgl.pools.mha_pool("layer_first", torch.float16)).batch_exists(KEYS[:1]) == 0
    assert make(pool, namespace="other").batch_exists(KEYS[:1]) == 0


def test_misuse_is_an_error_and_not_a_wrong_page(sgl, make):
    pool = sgl.pools.mha_pool("layer_first")
    backend = make(pool)
    with pytest.raises(ValueError, match="host slots given for 2 pages"):
        backend.batch_set_v1(KEYS[:2], slots(pool, [0]))
    with pytest.raises(ValueError, match="host slots given for 1 pages"):
        backend.batch_get_v1(KEYS[:1], slots(pool, [0])[:-1])


def test_clear_drops_this_models_pages_and_leaves_others(sgl, make):
    pool = sgl.pools.mha_pool("layer_first")
    mine, other = make(pool), make(pool, namespace="other")
    for backend in (mine, other):
        backend.batch_set_v1(KEYS[:2], slots(pool, [0, 1]))
    mine.clear()
    assert mine.batch_exists(KEYS[:2]) == 0
    assert other.batch_exists(KEYS[:2]) == 2


def test_new_weights_never_meet_old_pages(sgl, make, tmp_path):
    pool = sgl.pools.mha_pool("layer_first")
    backend = make(pool)
    backend.batch_set_v1(KEYS[:1], slots(pool, [0]))
    backend.weights_changed(None, flushed=True)
    assert backend.batch_exists(KEYS[:1]) == 0
    # The update was not followed by a flush: pages of old weights may be stored until there is one.
    backend.weights_changed(None, flushed=False)
    backend.batch_set_v1(KEYS[1:2], slots(pool, [1]))
    assert backend.batch_exists(KEYS[1:2]) == 1
    backend.cache_flushed()
    assert backend.batch_exists(KEYS[1:2]) == 0
    backend.batch_set_v1(KEYS[1:2], slots(pool, [1]))
    backend.cache_flushed()  # nothing stale any more: stays where it is
    assert backend.batch_exists(KEYS[1:2]) == 1


def test_a_backend_attached_after_an_update_knows_of_it(sgl, make, monkeypatch):
    from cacheflow_sgl.engine import weight_updates

    pool = sgl.pools.mha_pool("layer_first")
    make(pool).batch_set_v1(KEYS[:1], slots(pool, [0]))
    now = weight_updates.ServedWeights(updates=1, weights=None, flushed=True)
    monkeypatch.setattr(sgl.storage, "served", now)
    later = make(pool)
    assert later.batch_exists(KEYS[:1]) == 0
    later.batch_set_v1(KEYS[:1], slots(pool, [0]))
    assert make(pool).batch_exists(KEYS[:1]) == 0  # attached after one more, unknown again


def test_plain_values(sgl, make):
    backend = make(sgl.pools.mha_pool("layer_first"))
    value, other = torch.arange(6, dtype=torch.float32), torch.zeros(6)
    assert backend.set("value", value)
    assert backend.get("value", other) is other
    assert torch.equal(other, value)
    assert backend.get("missing", torch.zeros(6)) is None
    assert backend.get("value", torch.zeros(5)) is None  # another size is another value
    assert backend.batch_set(["a", "b"], [value, value + 1])
    assert backend.batch_get(["b", "x"], [torch.zeros(6), torch.zeros(6)])[1] is None


# ---- Interface v2 ----


def transfer(sgl, name, pool, pages, policy="all_pages", keys=None):
    return sgl.hicache.PoolTransfer(
        name=name,
        host_indices=slots(pool, pages),
        keys=[KEYS[page] for page in pages] if keys is None else keys,
        hit_policy=sgl.hicache.PoolHitPolicy(policy),
    )


def test_pools_are_stored_and_loaded_side_by_side(sgl, make):
    names = sgl.hicache.PoolName
    kv, extra = sgl.pools.mha_pool("layer_first"), sgl.pools.mla_pool("page_first")
    for seed, pool in enumerate((kv, extra)):
        sgl.pools.fill_randomly(pool, seed)
    backend = make(kv)
    backend.register_mem_host_pool_v2(extra, names.INDEXER)
    moves = [transfer(sgl, names.KV, kv, [0, 1]), transfer(sgl, names.INDEXER, extra, [0])]
    assert backend.batch_set_v2(moves) == {names.KV: [True, True], names.INDEXER: [True]}
    wanted = page_bytes(extra, 0)
    sgl.pools.fill_randomly(extra, 9)
    assert backend.batch_get_v2(moves) == {names.KV: [True, True], names.INDEXER: [True]}
    assert page_bytes(extra, 0) == wanted
    query = [transfer(sgl, names.INDEXER, extra, [])]
    result = backend.batch_exists_v2(KEYS[:3], query)
    assert result.kv_hit_pages == 1
    assert result.extra_pool_hit_pages == {names.KV: 2, names.INDEXER: 1}


def test_a_logical_anchor_stores_that_its_pages_are_there(sgl, make):
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    pool = LogicalHostPool(size=64, page_size=4)
    backend = make(pool)
    assert backend.batch_set_v1(KEYS[:2], slots(pool, [0, 1])) == [True, True]
    assert backend.batch_exists(KEYS[:3]) == 2
    assert backend.batch_get_v1(KEYS[:3], slots(pool, [2, 3, 4])) == [True, True, False]


@pytest.mark.parametrize("layout", ("page_first", "page_first_direct"))
def test_mamba_states_are_stored_whole_and_apart_on_each_rank(sgl, make, layout):
    names = sgl.hicache.PoolName
    kv, states = sgl.pools.mla_pool("page_first"), sgl.pools.mamba_pool(layout)
    sgl.pools.fill_randomly(states)
    ranks = [make(kv, rank, 2, mla=True) for rank in (0, 1)]
    for backend in ranks:
        backend.register_mem_host_pool_v2(states, names.MAMBA)
    move = [transfer(sgl, names.MAMBA, states, [2, 5])]
    wanted = [page_bytes(states, slot) for slot in (2, 5)]
    assert ranks[0].batch_set_v2(move) == {names.MAMBA: [True, True]}
    sgl.pools.fill_randomly(states, seed=1)
    assert ranks[1].batch_get_v2(move) == {names.MAMBA: [False, False]}
    assert ranks[0].batch_get_v2(move) == {names.MAMBA: [True, True]}
    assert [page_bytes(states, slot) for slot in (2, 5)] == wanted


def test_a_sidecar_registered_late_takes_part(sgl, make):
    kv, late = sgl.pools.mha_pool("layer_first"), sgl.pools.mla_pool("layer_first")
    backend = make(kv)
    backend.register_mem_host_pool_v2(late, "boundary")
    assert backend.batch_set_v2([transfer(sgl, "boundary", late, [0])]) == {"boundary": [True]}


@settings(max_examples=60, deadline=None)
@given(
    kv=st.lists(st.booleans(), min_size=6, max_size=6),
    extra=st.lists(st.booleans(), min_size=6, max_size=6),
    policy=st.sampled_from(["all_pages", "trailing_pages"]),
    window=st.integers(1, 3),
)
def test_hit_policies_agree_with_sglangs_file_backend(
    sgl, tmp_path_factory, kv, extra, policy, window
):
    """The same pages stored in both; the answer of SGLang's own backend is the reference."""
    folder = tmp_path_factory.mktemp("file")
    reference = object.__new__(sgl.hicache.HiCacheFile)
    reference.file_path = str(folder)
    reference.metadata_cache = None
    reference.config_suffix = reference.tp_config_suffix = "_m"
    names = sgl.hicache.PoolName
    held = {"kv": set(), "swa": set()}
    for name, flags in (("kv", kv), ("swa", extra)):
        for key, there in zip(KEYS, flags, strict=False):
            if there:
                held[name].add(key)
                (folder / f"{reference._get_component_key(key, names(name))}.bin").touch()
    query = [
        sgl.hicache.PoolTransfer(
            name=names.SWA, keys=KEYS[:window], hit_policy=sgl.hicache.PoolHitPolicy(policy)
        )
    ]
    backend = object.__new__(sgl.storage.CacheFlowStorage)
    backend._pools = {
        name: SimpleNamespace(
            namespace=SimpleNamespace(contains=lambda keys, n=name: [k in held[n] for k in keys])
        )
        for name in held
    }
    ours = backend.batch_exists_v2(KEYS[:6], query)
    theirs = reference.batch_exists_v2(KEYS[:6], query)
    assert ours.kv_hit_pages == theirs.kv_hit_pages
    assert ours.restorable_prefix_pages == theirs.restorable_prefix_pages
    assert ours.extra_pool_hit_pages == theirs.extra_pool_hit_pages


def test_the_options_reach_the_store(sgl, make):
    backend = make(sgl.pools.mha_pool("layer_first"), capacity="100MB")
    assert backend._store.usage().capacity_bytes == 100 * 10**6


def test_a_bad_option_is_refused_here_as_well(sgl, make):
    with pytest.raises(ValueError, match="did you mean 'directory'"):
        make(sgl.pools.mha_pool("layer_first"), directroy="/x")
