"""Single seams of the patch for restores, and how the plugin tells that a patch is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pytest

from cacheflow_sgl.engine import plugin

from .test_patched_arguments import python


def patched() -> str:
    from cacheflow_sgl.core import geometry  # noqa: F401

    return "patched"


def stock() -> str:
    return "stock"


@wraps(patched)
def hooked_by_another() -> str:
    return patched()


@pytest.mark.parametrize(
    ("original", "hooked"), [(patched, False), (hooked_by_another, False), (stock, True)]
)
def test_a_function_that_calls_us_is_left_alone(original: Callable[[], str], hooked: bool) -> None:
    around = plugin._unless_patched(lambda original: f"hooked {original()}")
    assert around(original) == f"hooked {original()}" if hooked else original()


SEAMS = """
import pkgutil
from cacheflow_sgl.engine import plugin
from sglang.srt.plugins.hook_registry import HookRegistry

plugin._hook_restores()
for target, [(_, hook, _)] in HookRegistry._hooks.items():
    owner, _, name = target.rpartition(".")
    function = getattr(pkgutil.resolve_name(owner), name)
    print(name, hook.__qualname__.split(".")[0], plugin._calls_us(function))
"""


@pytest.mark.engine
def test_the_plugin_knows_the_patched_seams(patched_sglang: Path) -> None:
    result = python(patched_sglang, "-c", SEAMS)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        "_get_new_batch_prefill_raw _unless_patched True",
        "_get_total_uncached_sizes _unless_patched True",
        "add_chunked_req _unless_patched True",
        "add_one_req _unless_patched True",
        # With the plugin, our cache is there for a backend that is attached later, too. It is
        # made once: the patch leaves a cache class that was asked for alone.
        "create_unified_radix_cache _later True",
        "forward_batch_generation _unless_patched True",
        # Says the same twice.
        "is_request_level_customized_info_key _later False",
    ]


WITHOUT_US = """
import sys
from types import SimpleNamespace
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache import registry, unified_radix_cache

def said(word):
    return lambda *args, **kwargs: word

tree_cache = SimpleNamespace(init_hicache=said(None), swa_transient_size=said(0))
adder = object.__new__(PrefillAdder)
adder.tree_cache = tree_cache
adder._add_one_req, adder._add_chunked_req = said("one"), said("chunked")
print(adder.add_one_req("req", has_chunked_req=False, truncation_align_size=None))
print(adder.add_chunked_req("req"))
scheduler = object.__new__(Scheduler)
scheduler.tree_cache, scheduler._build_prefill_batch = tree_cache, said("batch")
print(scheduler._get_new_batch_prefill_raw(prefill_delayer_single_pass=None, running_batch=None))
worker = object.__new__(TpModelWorker)
worker._forward_batch_generation = said("forward")
print(worker.forward_batch_generation("batch", forward_batch=None))
checker = object.__new__(SchedulerInvariantChecker)
checker.tree_cache, type(checker)._requests_owning_rows = tree_cache, said([])
print(checker._get_total_uncached_sizes())

class Tree:
    def __init__(self, params):
        self.cache_controller = SimpleNamespace(layer_done_counter=None)

    def init_hicache(self, server_args, params):
        print("stock tree")

unified_radix_cache.UnifiedRadixCache = Tree
registry.get_disagg = lambda: SimpleNamespace(disaggregation_decode_retraction_backup=None)

def create(backend, **changes):
    registry.get_memory = lambda: SimpleNamespace(
        hicache_storage_backend=backend, enable_unified_cache_external_linker=False
    )
    worker = SimpleNamespace(register_hicache_layer_transfer_counter=said(None))
    context = dict(
        server_args=None, params=SimpleNamespace(req_to_token_pool=None), is_hybrid_swa=False,
        is_hybrid_ssm=False, enable_hierarchical_cache=True, disable_radix_cache=False,
        tp_worker=worker,
    )
    return registry.create_unified_radix_cache(SimpleNamespace(**{**context, **changes}))

create("file")
create("cacheflow", disable_radix_cache=True)
create("cacheflow", enable_hierarchical_cache=False)
print([name for name in sys.modules if name.startswith("cacheflow_sgl")])

sys.modules["cacheflow_sgl.engine.radix_cache"] = SimpleNamespace(create=said("our tree"))
print(create("cacheflow"))
"""


@pytest.mark.engine
def test_who_does_not_use_cacheflow_does_not_import_it(patched_sglang: Path) -> None:
    result = python(patched_sglang, "-c", WITHOUT_US)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        *("one", "chunked", "batch", "forward", "(0, 0)"),
        *("stock tree", "stock tree", "[]", "our tree"),
    ]


SECOND_CHUNKED = """
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

adder = object.__new__(PrefillAdder)
adder.page_size, adder.rem_chunk_tokens, adder.can_run_list = 64, 128, []
adder.dllm_config, adder.exact_chunk_fill, adder.new_chunked_req = None, False, None
adder._replay_len = lambda req, prefix_len: 0
adder._check_prefill_budget = lambda req, **sizes: (True, sizes["chunk_limit"])
adder._check_prefill_tile_budget = lambda tokens: None

class Req:
    prefix_len = 0
    full_untruncated_fill_ids = [0] * 300
    sampling_params = type("", (), {"max_new_tokens": 1})

def select(has_chunked_req):
    return adder._select_prefill_admission(
        Req(), total_tokens=301, host_hit_length=0, swa_host_hit_length=0,
        truncation_align_size=None, has_chunked_req=has_chunked_req,
    )

print(select(False).is_chunked, select(True) is AddReqResult.OTHER)
adder.new_chunked_req = Req()
print(select(False) is AddReqResult.OTHER)
"""


@pytest.mark.engine
def test_no_second_chunked_request_is_admitted(patched_sglang: Path) -> None:
    result = python(patched_sglang, "-c", SECOND_CHUNKED)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True", "True", "True"]
