"""Each piece that the CPU device supplies, against what it stands for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl import cpu
from cacheflow_sgl.cpu import attention, threads, transfer

pytestmark = pytest.mark.engine


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter, so that what it imports and sets stays its own."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def activated_python(code: str, pythonpath: str = "") -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": pythonpath} if pythonpath else {}
    cpu.prepare(environ)
    return run_python(code, **environ)


# --- the stand-in for sgl_kernel ---------------------------------------------------------------


def test_every_kernel_imports_and_names_itself_when_called():
    done = activated_python(
        "import sgl_kernel, sgl_kernel.some.deep.module\n"
        "from sgl_kernel import silu_and_mul\n"
        "from sgl_kernel.scalar_type import scalar_types\n"
        "scalar_types.uint4b8\n"
        "for op in (silu_and_mul, scalar_types.uint4b8, sgl_kernel.some.deep.module.op):\n"
        "    try: op(1, out=2)\n"
        "    except RuntimeError as error: print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    named = [line.partition(" was called")[0] for line in done.stdout.splitlines()]
    assert named == [
        "sgl_kernel.silu_and_mul",
        "sgl_kernel.scalar_type.scalar_types.uint4b8",
        "sgl_kernel.some.deep.module.op",
    ]


def test_an_installed_sgl_kernel_that_loads_is_used(tmp_path: Path):
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("from . import inner\nname = 'installed'\n")
    (package / "inner.py").write_text("value = 3\n")
    done = activated_python(
        "import sgl_kernel, sgl_kernel.inner\n"
        "print(sgl_kernel.name, sgl_kernel.inner.value, sgl_kernel.__file__)\n"
        "import sgl_kernel.absent\n",
        pythonpath=str(tmp_path),
    )
    assert done.stdout.split() == ["installed", "3", str(package / "__init__.py")]
    assert "No module named 'sgl_kernel.absent'" in done.stderr


def test_an_installed_sgl_kernel_that_breaks_leaves_nothing_behind(tmp_path: Path):
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("from . import inner\nraise ImportError('no driver')\n")
    (package / "inner.py").write_text("value = 3\n")
    done = activated_python(
        "import sgl_kernel, sgl_kernel.inner\n"
        "try: sgl_kernel.inner.value()\n"
        "except RuntimeError as error: print(error)\n",
        pythonpath=str(tmp_path),
    )
    assert "sgl_kernel.inner.value was called" in done.stdout
    assert "(no driver)" in done.stdout


def test_a_spawned_child_finds_it_and_the_users_path_and_sitecustomize(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'\n")
    (tmp_path / "of_the_user.py").write_text("")
    script = tmp_path / "main.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "def child():\n"
        "    import os, of_the_user, sgl_kernel\n"
        "    print(os.environ['SEEN'], type(sgl_kernel).__name__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    from cacheflow_sgl import cpu\n"
        "    cpu.activate(); cpu.activate()\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    process = context.Process(target=child)\n"
        "    process.start(); process.join(); sys.exit(process.exitcode)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["yes", "MissingModule"]


def test_activation_after_sglang_is_refused():
    done = run_python(
        "import sglang.srt.environ\nfrom cacheflow_sgl import cpu\ncpu.activate()",
    )
    assert "RuntimeError: cacheflow_sgl.cpu.activate() came after SGLang's import" in done.stderr


def test_nothing_is_hooked_where_the_cpu_was_not_chosen():
    done = run_python(
        "from sglang.srt.plugins import load_plugins\nload_plugins()\nimport sys\n"
        "print('cacheflow_sgl.cpu.hooks' in sys.modules)"
    )
    assert done.stdout.split() == ["False"], done.stderr


def test_the_plugin_applies_every_hook():
    done = activated_python(
        "from sglang.srt.plugins import load_plugins\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry as r\n"
        "load_plugins()\n"
        "from cacheflow_sgl import cpu\n"
        "before = {t: len(h) for t, h in r._hooks.items()}\n"
        "cpu.register_hooks()\n"
        "assert before == {t: len(h) for t, h in r._hooks.items()}\n"
        "assert set(r._hooks) == r._patched, set(r._hooks) - r._patched\n"
        "import torch; torch.cpu.Stream().synchronize()\n"
        "from tests.engine import host_pools\n"
        "make = host_pools.MHATokenToKVPoolHost\n"
        "pinned = lambda *args, **given: make(*args, **{**given, 'pin_memory': True})\n"
        "host_pools.MHATokenToKVPoolHost = pinned\n"
        "pool = host_pools.mha_pool('page_first')\n"
        "print(pool.pin_memory, pool.get_dummy_flat_data_page().is_pinned())\n",
        pythonpath=str(Path(__file__).parents[2]),
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


# --- transfers ---------------------------------------------------------------------------------

LAYOUTS = [
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_head", "kernel"),
]


@pytest.fixture(scope="module")
def pools():
    """Real host pools, with the transfers that they lack on a CPU."""
    from tests.engine import host_pools

    transfer.install("sglang.srt.mem_cache.pool_host.mha", "sglang.srt.mem_cache.pool_host.mla")
    return host_pools


def device_layers(pool) -> list[torch.Tensor]:
    if hasattr(pool, "device_k_buffers"):
        return [*pool.device_k_buffers, *pool.device_v_buffers]
    return list(pool.device_kv_buffers)


KINDS = {  # the host pools of SGLang, and the layouts each of them has
    "mha": {"layer_first", "page_first", "page_first_direct", "page_head"},
    "mha-asymmetric": {"page_first", "page_first_direct"},
    "mla": {"layer_first", "page_first", "page_first_direct"},
}
POOLS = [(kind, *way) for kind, layouts in KINDS.items() for way in LAYOUTS if way[0] in layouts]


@pytest.mark.parametrize(("kind", "layout", "backend"), POOLS)
def test_pages_survive_the_way_to_the_host_and_back(pools, kind, layout, backend):
    pool = (
        pools.mla_pool(layout)
        if kind == "mla"
        else pools.mha_pool(layout, v_dim=pools.DIM + (2 if kind == "mha-asymmetric" else 0))
    )
    layers = device_layers(pool)
    original = [layer.copy_(torch.randn(layer.shape)).clone() for layer in layers]
    page = torch.arange(pools.PAGE)
    # Pages 5, 1 and 3 of the device go to pages 2, 6 and 0 of the host, and back to 4, 7 and 0.
    source = torch.cat([5 * pools.PAGE + page, pools.PAGE + page, 3 * pools.PAGE + page])
    host = torch.cat([2 * pools.PAGE + page, 6 * pools.PAGE + page, page])
    target = torch.cat([4 * pools.PAGE + page, 7 * pools.PAGE + page, page])

    device_pool = SimpleNamespace(layer_shard_enabled=False, layer_num=pools.LAYERS)
    pool.backup_from_device_all_layer(device_pool, host, source, backend)
    for layer in layers:
        layer.zero_()
    for layer_id in range(pools.LAYERS):
        pool.load_to_device_per_layer(device_pool, host, target, layer_id, backend)

    for layer, before in zip(layers, original, strict=True):
        expected = torch.zeros_like(before)
        expected[target] = before[source]
        assert torch.equal(layer, expected)


@pytest.mark.parametrize(("layout", "backend"), LAYOUTS)
def test_the_host_holds_a_page_where_sglang_looks_for_it(pools, layout, backend):
    pool = pools.mha_pool(layout)
    layers = device_layers(pool)
    for layer in layers:
        layer.copy_(torch.randn(layer.shape))
    source, host = torch.arange(pools.PAGE), torch.arange(pools.PAGE) + 3 * pools.PAGE
    pool.backup_from_device_all_layer(None, host, source, backend)

    stored = pool.get_data_page(3 * pools.PAGE, flat=False)
    tokens = torch.stack([layer[source] for layer in layers]).unflatten(0, (2, pools.LAYERS))
    order = {  # from [K or V, layer, token, head, dim]
        "layer_first": (0, 1, 2, 3, 4),
        "page_first": (0, 2, 1, 3, 4),
        "page_first_direct": (0, 1, 2, 3, 4),
        "page_head": (0, 3, 2, 1, 4),
    }[layout]
    assert torch.equal(stored.reshape(-1), tokens.permute(order).reshape(-1))


# --- attention ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock():
    """SGLang's own extend attention; it needs no state of its backend here."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend


HEADS, HEAD_DIM, CONTEXT = 4, 8, 96


@st.composite
def batches(draw):
    """Requests as (prefix, rows), the size of a group of query heads, dtypes of model and KV."""
    requests = draw(
        st.lists(
            st.tuples(st.integers(0, CONTEXT // 2), st.integers(1, CONTEXT // 2)),
            min_size=1,
            max_size=4,
        )
    )
    return requests, draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 2**31))


def extend_arguments(requests, group, seed) -> dict[str, torch.Tensor | float | bool]:
    generator = torch.Generator().manual_seed(seed)
    slots = CONTEXT * len(requests) + 1
    rows = sum(rows for _, rows in requests)
    cache = (slots, HEADS // group, HEAD_DIM)
    return {
        "query": torch.randn(rows, HEADS, HEAD_DIM, generator=generator),
        "output": torch.full((rows, HEADS, HEAD_DIM), float("nan")),
        "k_cache": torch.randn(cache, generator=generator),
        "v_cache": torch.randn(cache, generator=generator),
        "req_to_token": torch.randperm(slots, generator=generator)[: slots - 1].view(-1, CONTEXT),
        "req_pool_indices": torch.randperm(len(requests), generator=generator),
        "seq_lens": torch.tensor([prefix + rows for prefix, rows in requests]),
        "extend_prefix_lens": torch.tensor([prefix for prefix, _ in requests]),
        "extend_seq_lens": torch.tensor([rows for _, rows in requests]),
        "scaling": HEAD_DIM**-0.5,
        "enable_gqa": group > 1,
        "causal": True,
    }


def not_called(*_: object, **__: object) -> torch.Tensor:
    raise AssertionError("fell back to SGLang's own attention")


@given(batches())
@settings(max_examples=40, deadline=None)
def test_extend_attention_equals_sglangs(stock, batch):
    arguments = extend_arguments(*batch)
    expected = stock._run_sdpa_forward_extend(stock, **arguments).clone()
    arguments["output"].fill_(float("nan"))
    got = attention.extend(not_called, stock, **arguments)
    assert got is arguments["output"]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_extend_attention_converts_a_cache_of_another_dtype(stock):
    arguments = extend_arguments([(7, 9), (0, 3)], 2, 0)
    for cache in ("k_cache", "v_cache"):
        arguments[cache] = arguments[cache].to(torch.bfloat16)
    expected = stock._run_sdpa_forward_extend(stock, **arguments).clone()
    got = attention.extend(not_called, stock, **arguments)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changed",
    [
        {"sliding_window_size": 5},
        {"causal": False},
        {"is_cross_attn": True, "encoder_lens": torch.tensor([4, 4])},
    ],
)
def test_what_it_does_not_know_goes_to_sglang(stock, changed):
    arguments = {**extend_arguments([(7, 9), (0, 3)], 2, 0), **changed}
    seen = []

    def original(*args, **kwargs):
        seen.append(True)
        return stock._run_sdpa_forward_extend(*args, **kwargs)

    got = attention.extend(original, stock, **arguments).clone()
    assert seen == [True]
    assert torch.equal(got, stock._run_sdpa_forward_extend(stock, **arguments))


# --- threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bind", "cores"), [("0", 1), ("0,1", 2), ("0-3", 4), ("0-3,8", 5), ("2-3,3-4", 3)]
)
def test_cores_of_a_bind_entry(bind: str, cores: int):
    assert threads.count_cores(bind) == cores


def test_a_rank_computes_with_as_many_threads_as_cores():
    before = torch.get_num_threads()
    try:
        threads.init_threads(not_called, local_omp_cpuid="0-2", dist_init_method=None)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
