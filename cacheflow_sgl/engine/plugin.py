"""Entry point `sglang.srt.plugins`: SGLang calls `register` in each of its processes.

Every seam is one function of one file here, hooked onto one SGLang function. SGLang swallows what
a plugin raises, so an unsupported SGLang gets only the checks that can tell the user about it.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable

from cacheflow_sgl import bench, cpu

from . import backend_name, forward_clock, launch_checks, weight_updates
from .version import UnsupportedSGLangError, check_sglang_version

logger = logging.getLogger(__name__)

_MEM_CACHE = "sglang.srt.mem_cache"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_HYBRID = f"{_MEM_CACHE}.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_FACTORY = f"{_MEM_CACHE}.storage.backend_factory.StorageBackendFactory"
_ATTACHMENT = f"{_MEM_CACHE}.unified_cache.storage_attachment.StorageAttachment"
_LAYOUTS = "sglang.srt.arg_groups.hicache_hook.resolve_storage_layout_compatibility"
_SERVER_ARGS = "sglang.srt.server_args"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_MANAGERS = "sglang.srt.managers"
_CHECKER = f"{_MANAGERS}.scheduler_components.invariant_checker.SchedulerInvariantChecker"
_STREAMER = f"{_MANAGERS}.scheduler_components.output_streamer.SchedulerOutputStreamer"
_WORKER = f"{_MANAGERS}.tp_worker.TpModelWorker"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def register() -> None:
    """Register every hook this process needs; SGLang applies them afterwards."""
    _hook_launch_checks()
    try:
        check_sglang_version()
    except UnsupportedSGLangError as error:
        logger.warning("%s; the plugin does nothing else", error)
        return
    if cpu.is_active():
        cpu.register_hooks()
    _hook_backend_name()
    _hook_weight_updates()
    _hook_restores()
    if bench.is_active():
        bench.register_hooks()


def _hook_launch_checks() -> None:
    """Bad options end the start (or the attach) with one line."""
    _after(f"{_SERVER_ARGS}.ServerArgs.add_cli_args", backend_name.add_flag_choice)
    _around(f"{_SERVER_ARGS}.prepare_server_args", launch_checks.check_command_line)
    _around(f"{_SERVER_ARGS}.ServerArgs.resolve_once", launch_checks.check_record)
    _around(f"{_ATTACHMENT}.attach", launch_checks.check_attach)


def _hook_backend_name() -> None:
    """`cacheflow` becomes a storage backend."""
    backend_name.register_backend()
    _around(f"{_FACTORY}._create_builtin_backend", backend_name.create_backend)
    _after(f"{_CONTROLLER}.attach_storage_backend", backend_name.use_v1_pages)
    _around(f"{_HYBRID}.should_backup", backend_name.back_up_own_shard)
    _after(_LAYOUTS, backend_name.use_storable_layout)


def _hook_weight_updates() -> None:
    """Stored pages follow the weights."""
    _after(f"{_ATTACHMENT}.__init__", weight_updates.after_attachment_made)
    _around(f"{_WEIGHTS}.update_weights_from_disk", weight_updates.after_disk_update)
    for update in ("distributed", "tensor", "ipc"):
        target = f"{_WEIGHTS}.update_weights_from_{update}"
        _around(target, weight_updates.after_memory_update)
    _around(f"{_WEIGHTS}.end_weight_update", weight_updates.after_memory_update)
    _after(f"{_SCHEDULER}.flush_cache", weight_updates.after_flush)


def _hook_restores() -> None:
    """Prefixes on the host come back by compute and load at once."""
    _around(f"{_MEM_CACHE}.registry.create_unified_radix_cache", _later("radix_cache", "create"))
    for add in ("add_one_req", "add_chunked_req"):
        target = f"{_MANAGERS}.schedule_policy.PrefillAdder.{add}"
        _around(target, _unless_patched(_later("admission", add)))
    _around(
        f"{_SCHEDULER}._get_new_batch_prefill_raw",
        _unless_patched(_later("scheduling", "new_prefill_batch")),
    )
    _around(
        f"{_CHECKER}._get_total_uncached_sizes",
        _unless_patched(_later("scheduling", "uncached_sizes")),
    )
    _around(
        f"{_STREAMER}.is_request_level_customized_info_key",
        _later("scheduling", "is_request_level"),
    )
    _around(f"{_WORKER}.forward_batch_generation", _unless_patched(forward_clock.around_forward))


def _later(module: str, name: str) -> Callable[..., object]:
    """A hook of this package whose module imports SGLang's, which only its processes should."""

    def hook(*args: object, **kwargs: object) -> object:
        function = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return function(*args, **kwargs)

    return hook


def _unless_patched(hook: Callable[..., object]) -> Callable[..., object]:
    """Leave alone a function that a source patch (patches/) has taught to call us itself."""

    def around(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        if _calls_us(original):
            return original(*args, **kwargs)
        return hook(original, *args, **kwargs)

    return around


@functools.cache
def _calls_us(function: Callable[..., object]) -> bool:
    """Whether the source of an SGLang function imports this package."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = () if code is None else code.co_names
    return any(name.partition(".")[0] == "cacheflow_sgl" for name in names)


def _around(target: str, hook: Callable[..., object]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)


def _after(target: str, hook: Callable[..., object]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AFTER)
