"""A real `CacheFlowRadixCache` over real pools, and the steps of a scheduler, without a server.

Every KV slot holds its token's id and position, so that a row can be checked for being right and
not only for being there.
"""

from __future__ import annotations

import atexit
import inspect
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestOutcome,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from cacheflow_sgl.core.geometry import Span, page_ceil
from cacheflow_sgl.core.policies import Policy
from cacheflow_sgl.core.report import Outcome, RestoreReport
from cacheflow_sgl.cpu import hooks
from cacheflow_sgl.engine import admission, radix_cache
from cacheflow_sgl.engine.loader import Loader
from cacheflow_sgl.engine.options import Options
from cacheflow_sgl.engine.restores import Restore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATIENCE_S = 20.0
"""How long a test waits for what must come."""


def _sglangs_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function without hooks: another test may have had this process load plugins, ours too.

    Asked at each call: SGLang puts a hooked function in every module that holds the bare one.
    """
    return inspect.unwrap(function)


@dataclass
class Transfers:
    """What happens to loads: they can be held back and made to fail."""

    fail_next: int = 0
    done: list[tuple[str, Span]] = field(default_factory=list)
    _open: threading.Event = field(default_factory=threading.Event)
    _begun: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._open.set()

    def hold(self) -> None:
        """From now on a load waits before it writes."""
        self._begun.clear()
        self._open.clear()

    def release(self) -> None:
        """Let held loads go on."""
        self._open.set()

    def wait_until_held(self) -> None:
        """Wait until a load is under way."""
        assert self._begun.wait(PATIENCE_S), "no load began"

    def run(self, restore: Restore, claim: Span, transfer: Callable[[Restore, Span], int]) -> int:
        self._begun.set()
        assert self._open.wait(PATIENCE_S), "a held load was never released"
        if self.fail_next:
            self.fail_next -= 1
            raise OSError("as the test wants")
        nbytes = transfer(restore, claim)
        self.done.append((restore.req.rid, claim))
        return nbytes


class WatchedCache(radix_cache.CacheFlowRadixCache):
    """Ours, with options but no storage backend, counted pins, kept reports, loads at will."""

    def __init__(self, params: Any) -> None:
        self.transfers = Transfers()
        self.chosen = Options()
        self.host_pins = 0
        self.reports: list[RestoreReport] = []
        super().__init__(params)

    @property
    def options(self) -> Options:
        return self.chosen

    def inc_host_lock_ref(self, node_id: Any) -> Any:
        self.host_pins += 1
        return super().inc_host_lock_ref(node_id)

    def dec_host_lock_ref(self, node_id: Any, params: Any) -> Any:
        self.host_pins -= 1
        return super().dec_host_lock_ref(node_id, params)

    def end(self, restore: Restore, outcome: Outcome) -> RestoreReport:
        self.reports.append(super().end(restore, outcome))
        return self.reports[-1]

    def _transfer(self, restore: Restore, claim: Span) -> int:
        return self.transfers.run(restore, claim, super()._transfer)


class SteppedLoader(Loader):
    """The I/O lane without its thread: a load begins and ends when the test says so."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader._transfer, loader._claim_size, loader._observe)
        self._under_way: list[tuple[Restore, Span]] = []

    def submit(self, restore: Restore) -> None:
        self._restores.append(restore)

    def withdraw(self, restore: Restore) -> None:
        restore.pointers.stop_loading()
        while any(loading is restore for loading, _ in self._under_way):
            self.finish()
        super().withdraw(restore)

    def begin(self, tokens: int | None = None) -> bool:
        """Claim for the first restore that has something to load; False where none has."""
        for restore in self._restores:
            claim = restore.pointers.claim_load(tokens or self._claim_size(restore))
            if claim is not None:
                self._under_way.append((restore, claim))
                return True
        return False

    def finish(self) -> bool:
        """End the oldest load that has begun; False where none has."""
        if not self._under_way:
            return False
        self._load(*self._under_way.pop(0))
        return True

    def run(self) -> None:
        """Load all that can be loaded."""
        while self.begin() or self._under_way:
            self.finish()


@dataclass
class Stand:
    """One scheduler process: pools, cache, requests."""

    page: int = 16
    chunk: int = 128
    slots: int = 2048
    host_slots: int = 8192
    layout: str = "layer_first"
    waiting: list[Req] = field(default_factory=list)
    chunked: Req | None = None
    prefilled: list[Req] = field(default_factory=list)
    """Requests whose prompt has been computed; they hold their rows."""

    def __post_init__(self) -> None:
        server_args = ServerArgs(
            model_path="dummy",
            device=DEVICE,
            page_size=self.page,
            chunked_prefill_size=self.chunk,
            hicache_ratio=self.host_slots / self.slots,
            hicache_io_backend="direct",
            hicache_mem_layout=self.layout,
            hicache_write_policy="write_through",
        )
        set_global_server_args_for_scheduler(server_args)
        if DEVICE == "cpu":
            hooks.register()
            HookRegistry.apply_hooks()
        self.rows = ReqToTokenPool(
            size=16, max_context_len=4096, device=DEVICE, enable_memory_saver=False
        )
        self.pool = MHATokenToKVPool(
            size=self.slots,
            page_size=self.page,
            dtype=torch.float32,
            head_num=1,
            head_dim=2,
            layer_num=2,
            device=DEVICE,
            enable_memory_saver=False,
        )
        kind = TokenToKVPoolAllocator
        sizes: dict[str, Any] = {"size": self.slots}
        if self.page > 1:
            kind, sizes = PagedTokenToKVPoolAllocator, sizes | {"page_size": self.page}
        self.allocator = kind(
            **sizes, dtype=torch.float32, device=DEVICE, kvcache=self.pool, need_sort=False
        )
        params = CacheInitParams(
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
            disable=False,
            tree_components=(ComponentType.FULL,),
            eviction_policy="lru",
        )
        self.cache = WatchedCache(params)
        self.cache.init_hicache(server_args, params)
        atexit.unregister(self.cache.shutdown)
        self.host = self.cache.cache_controller.mem_pool_host

    def close(self) -> None:
        self.transfers.release()
        self.cache.shutdown()
        self.cache.release_host_resources()

    @property
    def transfers(self) -> Transfers:
        return self.cache.transfers

    def step_loads(self) -> SteppedLoader:
        """Take the loads into the test's hand."""
        stepped = SteppedLoader(self.cache._loader)
        self.cache._loader = stepped
        return stepped

    # -- what is cached

    @staticmethod
    def tokens(seed: int, count: int) -> list[int]:
        """Random token ids."""
        ids: list[int] = np.random.default_rng(seed).integers(10, 30000, count).tolist()
        return ids

    def put_on_device(self, tokens: Sequence[int]) -> None:
        """Have the tree hold these tokens, whole pages, on device and host."""
        assert len(tokens) % self.page == 0
        slots = self._allocate(len(tokens))
        self._compute(slots, tokens, 0)
        self.cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots))
        self._back_up()

    def put_on_host(self, tokens: Sequence[int], *, nodes: int = 1) -> None:
        """Have the tree hold these tokens, whole pages in each of its nodes, on the host alone."""
        for node in range(1, nodes + 1):
            self.put_on_device(tokens[: len(tokens) * node // nodes])
        self.evict_device()

    def evict_device(self) -> None:
        """Evict what can be evicted; the host keeps its copies."""
        self._back_up()
        self.cache.evict(EvictParams(num_tokens=self.cache.evictable_size()))

    def evict_host(self) -> None:
        """Evict from the host what can be evicted."""
        self.cache.evict_host(self.host_slots)

    def _back_up(self) -> None:
        """Write what is new to the host; a node is locked until that is done."""
        self.cache.flush_pending_backups()
        self.cache.writing_check()

    def matched(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Tokens found on the device, and on the host beyond these."""
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        return match.device_prefix_len, match.host_hit_length

    # -- requests

    def request(
        self, tokens: Sequence[int], policy: str | None = "split", rid: str = "r", new: int = 4
    ) -> Req:
        custom = {radix_cache.REQUEST_KEY: policy} if policy else None
        sampling = SamplingParams(temperature=0, max_new_tokens=new, custom_params=custom)
        req = Req(rid, "", array("q", tokens), sampling)
        req.init_next_round_input(self.cache)
        return req

    def restore_of(self, tokens: Sequence[int], policy: str = "split", rid: str = "r") -> Restore:
        """A new restore, planned and pinned, of a request for these tokens and one more."""
        req = self.request([*tokens, 7], policy, rid)
        host = self.cache.host_span_of(req)
        assert host is not None
        plan, _ = self.cache.plan(Policy(policy), host.span)
        return self.cache.new_restore(req, host, Policy(policy), plan)

    def loads_while_queued(self, tokens: Sequence[int], rid: str = "r") -> Restore:
        """A started restore whose request waits in the queue."""
        restore = self.restore_of(tokens, "load", rid)
        restore.lock = self.cache.lock(restore.req.last_node)
        assert self.cache.take_slots(restore)
        self.cache.start(restore, admitted=False)
        return restore

    def loaded(self, restore: Restore) -> None:
        """Wait until nothing of it is left to load."""
        self.until(lambda: not restore.pointers.loads_in_flight and not restore.pointers.gap)

    def until(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not there():
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.001)

    # -- the scheduler's steps

    def adder(self, chunk: int | None = None, mixed: int = 0) -> PrefillAdder:
        running = SimpleNamespace(reqs=[], batch_size=lambda: 0)
        return PrefillAdder(
            self.page,
            self.cache,
            self.allocator,
            running,
            new_token_ratio=0.5,
            rem_input_tokens=16384,
            rem_chunk_tokens=chunk or self.chunk,
            num_mixed_decode_tokens=mixed,
            waiting_queue_len=len(self.waiting),
        )

    def add(
        self, adder: PrefillAdder, req: Req, has_chunked: bool = False, align: int | None = None
    ) -> AddReqResult:
        return admission.add_one_req(
            _sglangs_own(PrefillAdder.add_one_req), adder, req, has_chunked, align
        )

    def add_chunked(self, adder: PrefillAdder, req: Req) -> Req | None:
        return admission.add_chunked_req(_sglangs_own(PrefillAdder.add_chunked_req), adder, req)

    def step(self, chunk: int | None = None, mixed: int = 0) -> PrefillAdder:
        """What `_get_new_batch_prefill_raw`, its forward and its stash do."""
        self.cache.check_hicache_events()
        adder = self.adder(chunk, mixed)
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = self.add_chunked(adder, self.chunked)
        for req in list(self.waiting):
            if adder.budget_state() is AddReqResult.OTHER:
                break
            if not self.cache.check_prefetch_progress(req.cache_request_handle):
                continue
            req.init_next_round_input(self.cache)
            if self.add(adder, req, self.chunked is not None) is not AddReqResult.CONTINUE:
                break
        if adder.new_chunked_req is not None:
            assert self.chunked is None, "two chunked requests"
            self.chunked = adder.new_chunked_req
        self.forward(adder)
        return adder

    def forward(self, adder: PrefillAdder) -> None:
        """Compute what was admitted, and stash the chunked request."""
        self.cache.ready_to_load_host_cache()
        for req in adder.can_run_list:
            self.compute(req)
            if req in self.waiting:
                self.waiting.remove(req)
            if req is not self.chunked:
                self.prefilled.append(req)
        self.cache.loading_check()
        chunked = self.chunked
        if chunked is not None and chunked.extend_end > chunked.prefix_len:
            checkpoint_kv_cache(chunked, self.cache)

    def compute(self, req: Req) -> None:
        """As `alloc_for_extend` and a forward do: KV of [prefix_len, extend_end)."""
        first, stop = req.prefix_len, req.extend_end
        if not req.kv.holds_kv:
            prefix = self.cache.prefix_device_indices(req) if first else torch.empty(0)
            assert self.rows.alloc([req]) is not None
            self.rows.write((req.kv.req_pool_idx, slice(0, first)), prefix[:first].to(torch.int64))
        self.assert_row_right(req, first)
        last = self.rows.req_to_token[req.kv.req_pool_idx, max(first - 1, 0)].to(torch.int64)
        inside = min(-first % self.page, stop - first)  # a chunk may end within a page
        begun = last + 1 + torch.arange(inside, device=last.device)
        slots = torch.cat((begun, self._allocate(stop - first - inside)))
        self.rows.write((req.kv.req_pool_idx, slice(first, stop)), slots)
        self._compute(slots, req.full_untruncated_fill_ids[first:stop], first)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = stop

    def finish(self, req: Req) -> None:
        """It is done: its prompt goes to the tree."""
        self.assert_row_right(req, req.extend_end)
        req.finished_reason = FINISH_LENGTH(length=1)
        release_kv_cache(req, self.cache, checkpoint=True)
        self.prefilled.remove(req)

    def abort(self, req: Req) -> None:
        """A client has gone, wherever its request is."""
        if req in self.waiting:
            self.waiting.remove(req)
            self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
            return
        req.finished_reason = FINISH_ABORT()
        release_kv_cache(req, self.cache, checkpoint=False)
        self._forget(req)

    def retract(self, req: Req) -> None:
        """It gives its memory back and starts again later."""
        release_kv_cache(req, self.cache, checkpoint=False)
        self._forget(req)
        req.reset_for_retract()
        self.waiting.append(req)

    def _forget(self, req: Req) -> None:
        if req is self.chunked:
            self.chunked = None
        else:
            self.prefilled.remove(req)

    def serve(self, tokens: Sequence[int], policy: str, rid: str) -> Req:
        """A whole request, from its arrival to its end."""
        req = self.request(tokens, policy, rid)
        self.run(req)
        self.finish(req)
        return req

    def run(self, *requests: Req) -> None:
        """Serve requests until all of them are computed."""
        self.waiting += requests
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.step()
            self.check()
            if not self.waiting and self.chunked is None:
                return
            self.cache.wait_for_load(0.001)
        raise AssertionError("a request never got its turn")

    # -- what must hold

    def check(self) -> None:
        """Every slot has one owner, all facts agree."""
        self.cache.check_integrity()
        names, slots = zip(*self._owned(), strict=True)
        owned = sorted(torch.cat([part.cpu().to(torch.int64) for part in slots]).tolist())
        sizes = dict(zip(names, map(len, slots), strict=True))
        assert len(set(owned)) == len(owned), f"slots have two owners: {sizes}"
        assert owned == list(range(self.page, self.slots + self.page)), f"slots are lost: {sizes}"

    def check_at_rest(self) -> None:
        """Nothing runs: no restore, pin or lock is left, all can be evicted from both tiers."""
        assert not self.waiting and not self.prefilled and self.chunked is None
        assert not self.cache.restores
        assert self.cache.host_pins == 0
        assert not self.cache._loaded_while_queued and not self.cache._failed_in_queue
        self._back_up()
        self.check()
        assert self.cache.protected_size() == 0, "a device node is still locked"
        self.evict_device()
        self.evict_host()
        assert self.allocator.available_size() == self.slots
        assert self.host.available_size() == self.host.size

    def assert_row_right(self, req: Req, stop: int) -> None:
        """The KV that its row names is that of its first `stop` tokens."""
        slots = self.rows.req_to_token[req.kv.req_pool_idx, :stop].to(torch.int64)
        want = self._kv(req.full_untruncated_fill_ids[:stop], 0)
        for layer in range(2):
            for buffer in (self.pool.k_buffer[layer], self.pool.v_buffer[layer]):
                assert torch.equal(buffer[slots].cpu(), want), f"{req.rid}: KV is wrong"

    def _owned(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "free", self._free()
        yield "tree", self.cache.all_values_flatten()
        for req in {id(r): r for r in [*self.prefilled, self.chunked] if r is not None}.values():
            row = self.rows.req_to_token[req.kv.req_pool_idx]
            own = row[req.kv.cache_protected_len : req.kv.kv_allocated_len]
            yield f"row of {req.rid}", self._whole_pages(own)
        for restore in self.cache.restores.values():
            yield f"restore of {restore.req.rid}", restore.device_slots_of(restore.private)

    def _free(self) -> torch.Tensor:
        first = self.allocator.get_all_free_pages() * self.page
        return (first[:, None] + torch.arange(self.page, device=first.device)).flatten()

    def _whole_pages(self, slots: torch.Tensor) -> torch.Tensor:
        first = torch.unique(slots // self.page) * self.page
        return (first[:, None] + torch.arange(self.page, device=first.device)).flatten()

    def _allocate(self, tokens: int) -> torch.Tensor:
        whole = page_ceil(tokens, self.page)
        self.allocator.evict_to_free_tokens(self.cache, whole)
        slots = self.allocator.alloc(whole)
        assert slots is not None, "admitted without memory"
        return slots[:tokens].to(torch.int64)

    def _compute(self, slots: torch.Tensor, tokens: Sequence[int], first: int) -> None:
        value = self._kv(tokens, first).to(DEVICE)
        for layer in range(2):
            self.pool.k_buffer[layer][slots] = value
            self.pool.v_buffer[layer][slots] = value

    def _kv(self, tokens: Sequence[int], first: int) -> torch.Tensor:
        ids = torch.tensor(list(tokens), dtype=torch.float32)
        positions = torch.arange(first, first + len(ids), dtype=torch.float32)
        return torch.stack((ids, positions), dim=1)[:, None, :]
