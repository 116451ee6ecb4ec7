"""The bench's hooks inside a server that a bench has started.

Throttle: every copy from host to device, SGLang's own and ours, goes over one link of the rate that
the settings name. A call that would be faster waits at its end, so on a GPU SGLang's own load does
not overlap its forward there, as it does unthrottled.

Forwards are timed around the worker's call: on a CPU by the clock, since it computes before it
returns; on a GPU by events on its stream, read once the scheduler is idle, so that nothing waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheflow_sgl.bench.protocol import Forward, Load, Part, ServerEnd

_TRANSFERS = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.submit_host_to_device"
_NEXT_BATCH = "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run"
_FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"


@dataclass
class Link:
    """A link that carries one thing after the other, at a rate. Times are seconds of one clock."""

    free_at_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def carry(self, nbytes: int, bytes_per_s: float, now_s: float) -> float:
        """Take `nbytes` on at `now_s`; when they have arrived."""
        with self._lock:
            self.free_at_s = max(self.free_at_s, now_s) + nbytes / bytes_per_s
            return self.free_at_s


@dataclass
class Hooks:
    """What the hooks of one scheduler process share."""

    end: ServerEnd
    link: Link = field(default_factory=Link)
    evicted: int = 0
    untold: list[tuple[list[Part], Any, Any]] = field(default_factory=list)
    """Forwards on a GPU whose time is not read yet, with the events before and after each."""

    def throttled(
        self, submit: Callable[..., Any], engine: Any, transfers: Any, **options: Any
    ) -> Any:
        """Around `L2TransferEngine.submit_host_to_device`."""
        start_s = time.perf_counter()
        nbytes = sum(t.host_pool.size_per_token * len(t.host_indices) for t in transfers)
        rate = self.end.settings.bytes_per_s
        arrives_s = self.link.carry(nbytes, rate, start_s) if rate else start_s
        completion = submit(engine, transfers, **options)
        time.sleep(max(0.0, arrives_s - time.perf_counter()))
        self.end.log(Load(nbytes, start_s, time.perf_counter() - start_s))
        return completion

    def timed(
        self, forward: Callable[..., Any], worker: Any, batch: Any, *rest: Any, **kw: Any
    ) -> Any:
        """Around `TpModelWorker.forward_batch_generation`."""
        if batch is None or not batch.forward_mode.is_extend():
            return forward(worker, batch, *rest, **kw)
        rows = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        parts = [Part(request.rid, start, count) for request, start, count in rows]
        if worker.device == "cpu":
            start_s = time.perf_counter()
            result = forward(worker, batch, *rest, **kw)
            self.end.log(Forward(parts, start_s, time.perf_counter() - start_s))
            return result
        before, after = _timing_event(), _timing_event()
        before.record()
        result = forward(worker, batch, *rest, **kw)
        after.record()
        self.untold.append((parts, before, after))
        return result

    def before_next_batch(self, scheduler: Any, *_args: Any, **_options: Any) -> None:
        """Before `Scheduler.get_next_batch_to_run`: evict the device if that was asked for."""
        wanted = self.end.settings.evict
        if wanted == self.evicted or not scheduler.is_fully_idle():
            return
        self._tell()
        if _emptied(scheduler.tree_cache):
            self.evicted = wanted
            self.end.acknowledge(wanted)

    def _tell(self) -> None:
        """Log the forwards of an idle GPU. Events tell how long, so one of now tells when."""
        if not self.untold:
            return
        now = _timing_event()
        now.record()
        now.synchronize()
        now_s = time.perf_counter()
        for parts, before, after in self.untold:
            at_s = now_s - before.elapsed_time(now) / 1000
            self.end.log(Forward(parts, at_s, before.elapsed_time(after) / 1000))
        self.untold.clear()


def register(path: Path) -> None:
    """Register the hooks in this process; they follow the settings in `path`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = Hooks(ServerEnd(path))
    HookRegistry.register(_TRANSFERS, hooks.throttled, HookType.AROUND)
    HookRegistry.register(_FORWARD, hooks.timed, HookType.AROUND)
    HookRegistry.register(_NEXT_BATCH, hooks.before_next_batch, HookType.BEFORE)


def _emptied(tree: Any) -> bool:
    """Evict all of the device; whether nothing is left there.

    Something may be: what is still being written to the host is locked, and goes next time.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree.evict(EvictParams(num_tokens=tree.evictable_size()))
    return bool(tree.evictable_size() == 0 and tree.protected_size() == 0)


def _timing_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)
