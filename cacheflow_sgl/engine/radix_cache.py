"""Seam: SGLang's radix cache with two-pointer restores; the home of their state.

`CacheFlowRadixCache` is SGLang's `UnifiedRadixCache` (`sglang.srt.mem_cache.unified_radix_cache`)
and changes nothing in its tree. It keeps the restores of one scheduler process, gives them device
slots, pins their host nodes, and ends them in every way a request can end. When a restore begins
and how far compute goes is decided where SGLang admits prefill work: see `admission.py`.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    CacheRequestOutcome,
    EvictParams,
)
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.utils import get_device_module

from cacheflow_sgl.core.costs import ComputeCost, LinkCost
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.plans import Costs, Plan, Way
from cacheflow_sgl.core.policies import Planner, Policy, is_overdue
from cacheflow_sgl.core.report import Outcome, RestoreReport

from . import forward_clock
from .envelope import Fallback, unsupported_server
from .forward_clock import ForwardClock
from .loader import Loader, record_fence
from .options import Options
from .restore_metrics import RestoreMetrics
from .restores import HostSpan, Restore
from .storage import CacheFlowStorage
from .timeline import Timeline

logger = logging.getLogger(__name__)
device_module = get_device_module()

REQUEST_KEY = "cacheflow_restore"
"""`sampling_params.custom_params` of a request may name a policy under it; its answer's `meta_info`
holds the restore report under it."""

_SHORTEST_SPAN = 64
"""Tokens; less is left to SGLang, whose one step then costs less than our two."""
_RECOMPUTES_PER_PROBE = 8


class CacheFlowRadixCache(UnifiedRadixCache):
    """SGLang's radix cache, and the restores that run on it.

    Attributes:
        restores: by request id: the one that SGLang computes in chunks, and those whose requests
            wait in its queue while all of their prefix is loaded.
        planner: plans and claim sizes; None where this server is outside the envelope.
        clock: times the forwards.
    """

    # -- set-up

    def __init__(self, params: Any) -> None:
        """`params` is SGLang's `CacheInitParams`."""
        self.restores: dict[str, Restore] = {}
        self.planner: Planner | None = None
        self.clock = ForwardClock(_timing_event_maker())
        self._loaded_while_queued: dict[str, int] = {}
        self._failed_in_queue: set[str] = set()
        self._recomputes = 0
        self._timeline: Timeline | None = None
        self._metrics: RestoreMetrics | None = None
        super().__init__(params)

    def init_hicache(self, server_args: Any, params: Any) -> None:
        """Set HiCache up, and the restores where this server supports them."""
        super().init_hicache(server_args, params)
        reason = unsupported_server(server_args, self)
        if reason is not None:
            logger.info(
                "cacheflow: no two-pointer restores with %s; SGLang's own load-back brings "
                "prefixes back",
                reason,
            )
            return
        controller = self.cache_controller
        costs = Costs(ComputeCost(), LinkCost(), controller.mem_pool_host.size_per_token)
        self.planner = Planner(server_args.chunked_prefill_size, self.page_size, costs)
        self._engine = L2TransferEngine(controller.io_backend)
        self._loader = Loader(self._transfer, self._load_claim_size, costs.link.observe)
        logger.info(
            "cacheflow: prefixes on the host come back by compute and load at once; chunk %d, "
            "page %d, %d bytes of KV a token",
            server_args.chunked_prefill_size,
            self.page_size,
            costs.bytes_per_token,
        )

    @property
    def options(self) -> Options | None:
        """The options of our storage backend while it is attached."""
        storage = self._storage
        return None if storage is None else storage.options

    # -- decisions (called by admission)

    def policy_of(self, req: Any) -> Policy:
        """The policy that the request names, or else the server's."""
        asked = (req.sampling_params.custom_params or {}).get(REQUEST_KEY)
        options = self.options
        if options is None or self.is_write_back:
            return Policy.SGLANG
        if req.rid in self._failed_in_queue:
            return Policy.RECOMPUTE
        return Policy(asked) if asked in tuple(Policy) else Policy(options.restore)

    def host_span_of(self, req: Any) -> HostSpan | None:
        """What the host has of its prefix beyond the device; None if not one plain run."""
        transfer, others = self.tree_core.build_load_back_spec(req.best_match_node, req=req)
        tokens = len(transfer.host_indices)
        whole = req.prefix_len % self.page_size == 0 and tokens % self.page_size == 0
        if others or not whole or tokens != req.host_hit_length or tokens < _SHORTEST_SPAN:
            return None
        span = Span(req.prefix_len, req.prefix_len + tokens)
        if span.tokens < 2 * self.page_size:
            return None
        return HostSpan(
            span, transfer.host_indices, list(transfer.nodes_to_load), req.best_match_node
        )

    def plan(self, policy: Policy, span: Span) -> tuple[Plan, bool]:
        """The plan for a span, and whether it is a recompute that should probe the link.

        A link that is never used is never measured: without a probe now and then a tier that was
        slow once would be taken for slow for good.
        """
        assert self.planner is not None
        plan = self.planner.plan(policy, span)
        if policy is not Policy.CACHEFLOW or plan.way is not Way.RECOMPUTE:
            return plan, False
        return plan, (self._recomputes + 1) % _RECOMPUTES_PER_PROBE == 0

    def compute_claim_size(self, restore: Restore) -> int:
        """Tokens that the next forward of this restore should take."""
        assert self.planner is not None
        now_s = time.perf_counter()
        pointers = restore.pointers
        nothing_comes = pointers.loading_stopped and not pointers.loads_in_flight
        if nothing_comes or self._load_is_overdue(restore, now_s):
            return min(self.planner.chunk, restore.pointers.gap)  # no load can be counted on
        return self.planner.compute_claim(
            restore.policy,
            position=restore.pointers.position,
            gap=restore.pointers.gap,
            load_in_flight=self._load_in_flight(restore, now_s),
            compute_in_flight_s=self._compute_in_flight_s(now_s),
        )

    # -- life of a restore (scheduler thread)

    def new_restore(
        self, req: Any, host: HostSpan, policy: Policy, plan: Plan, *, probe: bool = False
    ) -> Restore:
        """A restore with its host nodes pinned, and nothing else yet."""
        now_s = time.perf_counter()
        restore = Restore.planned(req, host, policy, plan, page=self.page_size, now_s=now_s)
        restore.probe = probe
        # A lock on the anchor protects the anchor alone: a host copy further up goes once another
        # request has brought its node back to the device.
        restore.pins = [(node, self.inc_host_lock_ref(node).to_dec_params()) for node in host.nodes]
        return restore

    def take_slots(self, restore: Restore) -> bool:
        """Give it device slots for what compute has not claimed; False without the memory."""
        allocator = self.token_to_kv_pool_allocator
        first = restore.pointers.position
        need = restore.span.stop - first
        short = need - allocator.available_size()
        if short > 0:
            self.evict_for_alloc(EvictParams(num_tokens=short))
        slots = allocator.alloc(need) if need <= allocator.available_size() else None
        if slots is None:
            return False
        restore.first, restore.device_slots = first, slots.to(torch.int64)
        restore.fence = record_fence(
            device_module, device_module.current_stream(), self.cache_controller.load_fence_stream
        )
        return True

    def start(self, restore: Restore, *, admitted: bool) -> None:
        """Load from now on."""
        restore.admitted = admitted
        self._recomputes += restore.probe
        self.restores[restore.req.rid] = restore
        self._loader.submit(restore)

    def admit(self, restore: Restore) -> None:
        """Its request has left the queue: SGLang now locks the device node of d."""
        restore.admitted = True
        self._unlock(restore)

    def give_to_compute(self, restore: Restore, claim: Span) -> None:
        """Free the slots of a compute claim: SGLang takes as many again for the forward."""
        self._free(restore.device_slots_of(claim))

    def jump(self, restore: Restore) -> None:
        """Where the pointers have met, let the request's row have what was loaded."""
        while (loaded := restore.pointers.jump()) is not None:
            req = restore.req
            row = (req.kv.req_pool_idx, slice(loaded.start, loaded.stop))
            self.req_to_token_pool.write(row, restore.device_slots_of(loaded))
            req.prefix_len = req.extend_end = loaded.stop
            req.kv.kv_allocated_len = req.kv.kv_committed_len = loaded.stop
            _count_cached(req, loaded)

    def finish(self, handle: CacheRequestHandle, outcome: CacheRequestOutcome) -> None:
        """A request ends: drop its restore, if it was aborted in the queue or while computing."""
        if outcome != CacheRequestOutcome.SUCCESS:
            self._end_of(handle.rid, Outcome.ABORTED)
        super().finish(handle, outcome)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """A request gives its row back: its restore ends, however it comes."""
        self._end_of(req.rid, Outcome.ABORTED if req.finished() else Outcome.RETRACTED)
        super().on_release(req, checkpointed=checkpointed)

    def end(self, restore: Restore, outcome: Outcome) -> RestoreReport:
        """Stop loading, give slots, pins and lock back, and report."""
        self._loader.withdraw(restore)
        self.restores.pop(restore.req.rid, None)
        private = restore.private
        self._free(restore.device_slots_of(private))
        self._unpin(restore)
        self._unlock(restore)
        restore.goes_on(time.perf_counter())
        return self._report(restore, outcome)

    def discard(self, restore: Restore) -> None:
        """Undo `new_restore`: it never began."""
        self._unpin(restore)
        self._unlock(restore)

    def note_fallback(self, req: Any, reason: Fallback) -> None:
        """A request with a prefix on the host was admitted by SGLang's own path."""
        _set_report(req, {"policy": Policy.SGLANG.value, "way": "sglang", "reason": reason.value})
        if self._metrics is not None:
            self._metrics.fell_back(reason.value)

    def note_recompute(self, restore: Restore) -> None:
        """A request was admitted as a plain recompute, by choice: all will be computed."""
        self._recomputes += 1
        restore.pointers.claim_compute(restore.span.tokens)
        self._report(restore, Outcome.RECOMPUTED)

    def wait_for_load(self, timeout_s: float) -> bool:
        """Wait until a restore can go on, at most `timeout_s`; whether one can.

        Meanwhile the I/O lane has the interpreter to itself.
        """
        if not self._loader.wait_until(self._can_go_on, timeout_s):
            return False
        self._settle_queued()
        return True

    def loaded_while_queued(self, req: Any) -> int:
        """Tokens of its prefix that were loaded while it waited; told once."""
        return self._loaded_while_queued.pop(req.rid, 0)

    # -- SGLang's own calls, once a scheduler step

    def check_hicache_events(self) -> None:
        """Poll: what forwards took, loads that have landed, loads that are late."""
        super().check_hicache_events()
        if self.planner is None:
            return
        self._export_metrics()
        self._learn_from_forwards()
        self._settle_queued()

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Whether a waiting request may be admitted: not while all of its prefix is loaded."""
        if not super().check_prefetch_progress(request):
            return False
        restore = self.restores.get(request.rid)
        return restore is None or not restore.holds_compute

    def _evict(self, params: EvictParams, *args: Any, **kwargs: Any) -> Any:
        """Evict; where the tree cannot give enough, the youngest waiting restores give way."""
        result = super()._evict(params, *args, **kwargs)
        short = params.num_tokens - result.num_tokens_evicted
        waiting = [r for r in self.restores.values() if not r.admitted]
        while short > 0 and waiting:
            restore = waiting.pop()
            short -= restore.private.tokens
            self.end(restore, Outcome.RETRACTED)
        return result

    def reset(self) -> None:
        """Forget everything; the allocator is cleared by whoever calls."""
        for restore in list(self.restores.values()):
            self._loader.withdraw(restore)
            del self.restores[restore.req.rid]
        self._loaded_while_queued.clear()
        self._failed_in_queue.clear()
        super().reset()

    def shutdown(self) -> None:
        """End the I/O lane before the pools go."""
        if self.planner is not None:
            self._loader.close()
        if self._timeline is not None:
            self._timeline.close()
        super().shutdown()

    # -- checks

    @property
    def private_tokens(self) -> int:
        """Device slots that no row and no tree node owns."""
        return sum(restore.private.tokens for restore in self.restores.values())

    def check_integrity(self) -> None:
        """AssertionError where restores, slots, pins and tree contradict each other."""
        for rid, restore in self.restores.items():
            assert restore.req.rid == rid, f"{restore.req.rid} is filed under {rid}"
            restore.check_integrity()
        assert sum(r.admitted for r in self.restores.values()) <= 1, "two chunked requests"
        if not self.restores:
            self.sanity_check()

    # -- inside

    @property
    def _storage(self) -> CacheFlowStorage | None:
        storage = getattr(self.cache_controller, "storage_backend", None)
        return storage if isinstance(storage, CacheFlowStorage) else None

    def _export_metrics(self) -> None:
        """Have our series appear at zero, once, where SGLang exports metrics."""
        storage = self._storage
        if self._metrics is None and self._enable_metrics_flag and storage is not None:
            self._metrics = RestoreMetrics(storage.rank_labels, [word.value for word in Fallback])

    def _can_go_on(self) -> bool:
        return any(
            not restore.pointers.meeting if restore.admitted else restore.loads_ended
            for restore in self.restores.values()
        )

    def _settle_queued(self) -> None:
        """Publish what has landed for waiting requests; give up what failed; see what is late."""
        now_s = time.perf_counter()
        for restore in [r for r in self.restores.values() if not r.admitted]:
            if restore.failed_loads or restore.pointers.loading_stopped:
                self._failed_in_queue.add(restore.req.rid)
                self.end(restore, Outcome.RETRACTED)
            elif restore.loads_ended:
                self._publish(restore)
            elif not restore.late and self._is_late(restore, now_s):
                restore.late = True

    def _transfer(self, restore: Restore, claim: Span) -> int:
        """Copy from host to device and wait for it (I/O thread); bytes moved."""
        controller = self.cache_controller
        with device_module.stream(self._engine.host_to_device_stream):
            host_slots, device_slots = controller.move_indices(
                restore.host_slots_of(claim), restore.device_slots_of(claim)
            )
            completion = self._engine.submit_host_to_device(
                controller._l2_load_transfers(host_slots, device_slots),
                transfer_layer_id_max=controller.transfer_layer_id_max,
            )
        completion.finish_event.synchronize()
        assert self.planner is not None
        nbytes: int = claim.tokens * self.planner.costs.bytes_per_token
        return nbytes

    def _load_claim_size(self, restore: Restore) -> int:
        assert self.planner is not None
        if restore.probe:
            return int(self.page_size)
        if restore.holds_compute:
            return self.planner.lone_load_claim(span=restore.span, gap=restore.pointers.gap)
        return self.planner.load_claim(
            restore.policy, position=restore.pointers.position, gap=restore.pointers.gap
        )

    def _load_in_flight(self, restore: Restore, now_s: float) -> int:
        """Tokens of this restore's load under way that are still to come."""
        loading = restore.loading
        if loading is None or self.planner is None or not self.planner.costs.known:
            return 0
        claim, began_s = loading
        done = (now_s - began_s) / max(self.planner.costs.load_s(claim.tokens), 1e-9)
        return round(claim.tokens * max(0.0, 1 - done))

    def _compute_in_flight_s(self, now_s: float) -> float:
        """Seconds until the forwards that were launched are done."""
        running = self.clock.running()
        if not running or self.planner is None or not self.planner.costs.compute.known:
            return 0.0
        cost = self.planner.costs.compute
        expected_s = sum(cost.seconds(forward.offset, forward.tokens) for forward in running)
        return max(0.0, expected_s - (now_s - running[0].launched_s))

    def _learn_from_forwards(self) -> None:
        assert self.planner is not None
        for forward in self.clock.take_finished():
            assert forward.interval is not None
            self.planner.costs.compute.observe(
                forward.offset, forward.tokens, forward.interval.seconds
            )
            for rid, span in forward.rows:
                if (restore := self.restores.get(rid)) is not None:
                    restore.compute_lane.add(forward.interval, span)

    def _is_late(self, restore: Restore, now_s: float) -> bool:
        """The watchdog of an all-load: whether it takes much longer than predicted."""
        if self._load_is_overdue(restore, now_s):
            return True
        if restore.first_load_s is None:  # other restores have the lane, or a forward must end
            return False
        return is_overdue(now_s - restore.first_load_s, restore.plan.expected_s.get(Way.LOAD))

    def _load_is_overdue(self, restore: Restore, now_s: float) -> bool:
        """Whether its load under way takes much longer than predicted."""
        assert self.planner is not None
        loading = restore.loading
        if loading is None or not self.planner.costs.known:
            return False
        claim, began_s = loading
        return is_overdue(now_s - began_s, self.planner.costs.load_s(claim.tokens))

    def _publish(self, restore: Restore) -> None:
        """All of a waiting request's prefix has landed: put it into the tree."""
        transfer, _ = self.tree_core.build_load_back_spec(restore.host.anchor, req=restore.req)
        missing = len(transfer.host_indices)
        # What others have brought back meanwhile is a front part: a node on the device has its
        # parents there.
        spare = restore.span.tokens - missing
        restore.pointers.jump()
        slots = restore.device_slots
        if missing and torch.equal(transfer.host_indices, restore.host.slots[spare:]):
            self._apply_cache_actions(
                self.tree_core.commit_load_back(restore.host.anchor, slots[spare:], transfer, {})
            )
            self.tree_core.finish_load_back(restore.host.anchor)
            slots = slots[:spare]
        self._free(slots)
        self._loaded_while_queued[restore.req.rid] = restore.span.tokens
        self.end(restore, Outcome.RESTORED)

    def _free(self, slots: torch.Tensor) -> None:
        """Give whole pages, in token order, back; unlike `free` this waits for no device."""
        self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)

    def _end_of(self, rid: str, outcome: Outcome) -> None:
        self._loaded_while_queued.pop(rid, None)
        self._failed_in_queue.discard(rid)
        if (restore := self.restores.get(rid)) is not None:
            self.end(restore, outcome)

    def _unpin(self, restore: Restore) -> None:
        for node, receipt in restore.pins:
            self.dec_host_lock_ref(node, receipt)
        restore.pins = []

    def _unlock(self, restore: Restore) -> None:
        self.unlock(restore.lock)
        restore.lock = None

    def _trace_path(self, path: str) -> Path:
        """One file for each data-parallel replica."""
        file = Path(path).expanduser()
        storage = self._storage
        replica = "0" if storage is None else storage.rank_labels["dp_rank"]
        return file if replica in ("0", "None") else file.with_stem(f"{file.stem}-dp{replica}")

    def _report(self, restore: Restore, outcome: Outcome) -> RestoreReport:
        report = restore.report(outcome, time.perf_counter())
        if outcome is not Outcome.RETRACTED:  # its request starts again, and is told then
            _set_report(restore.req, report.as_dict())
        if self._metrics is not None:
            self._metrics.finished(report)
        options = self.options
        if options is not None and options.restore_trace is not None:
            if self._timeline is None:
                self._timeline = Timeline(self._trace_path(options.restore_trace), rank=0)
            self._timeline.add(report, restore.compute_lane, restore.io_lane)
        return report


def create(original: Any, ctx: Any, *, cache_class: Any = None) -> Any:
    """Around `create_unified_radix_cache`: ours where HiCache is on and no other is asked for.

    `ctx` is SGLang's `TreeCacheBuildContext`.
    """
    if cache_class is None and ctx.enable_hierarchical_cache and not ctx.disable_radix_cache:
        cache_class = CacheFlowRadixCache
    cache = original(ctx, cache_class=cache_class)
    if isinstance(cache, CacheFlowRadixCache) and cache.planner is not None:
        setattr(ctx.tp_worker, forward_clock.ATTRIBUTE, cache.clock)
    return cache


def _timing_event_maker() -> Any:
    """Makes device events that measure time; None on the CPU, where forwards are synchronous."""
    try:
        device_module.Event(enable_timing=True)
    except TypeError:
        return None
    return lambda: device_module.Event(enable_timing=True)


def _count_cached(req: Any, loaded: Span) -> None:
    """Put tokens that were loaded after admission into `cached_tokens_details`."""
    if req.retracted_stain:
        return  # SGLang counts the first try only
    start = req.storage_hit_start
    from_storage = 0
    if start is not None and req.storage_hit_length:
        stop = min(loaded.stop, start + req.storage_hit_length)
        from_storage = max(0, stop - max(loaded.start, start))
    req.cached_tokens_storage += from_storage
    req.cached_tokens_host += loaded.tokens - from_storage


def _set_report(req: Any, report: dict[str, Any]) -> None:
    req.customized_info = {**(req.customized_info or {}), REQUEST_KEY: [report]}
