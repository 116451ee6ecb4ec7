"""Seam: where SGLang admits prefill work, a restore begins, goes on and meets.

SGLang computes one request at a time in chunks. A split restore is such a request: it is admitted
as a plain recompute whose first chunk is a compute claim, its tail is loaded into private slots
meanwhile, each further chunk is the next claim, and when the pointers meet its prefix jumps to N.
A request whose prefix is loaded whole waits in the queue instead, where it blocks nobody, and is
then admitted as a plain device hit; should a load be late, it becomes a split.

Functions here are around-hooks of `PrefillAdder` (`sglang/srt/managers/schedule_policy.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult

from cacheflow_sgl.core.geometry import Span, page_floor
from cacheflow_sgl.core.plans import Way
from cacheflow_sgl.core.policies import Policy
from cacheflow_sgl.core.report import Outcome

from .envelope import Fallback, request_is_supported
from .radix_cache import CacheFlowRadixCache
from .restores import Restore

_LONGEST_WAIT_S = 0.05
"""A step that has nothing else to do waits this long for the last load, then looks at its inbox."""

Add = Callable[..., Any]


def add_one_req(
    add: Add, adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None
) -> Any:
    """Around `PrefillAdder.add_one_req`: choose how the request's prefix comes back."""

    def stock() -> Any:
        return add(adder, req, has_chunked_req, truncation_align_size)

    cache = adder.tree_cache
    if not isinstance(cache, CacheFlowRadixCache) or cache.planner is None or not cache.options:
        return stock()
    chunked = has_chunked_req or adder.new_chunked_req is not None
    restore = cache.restores.get(req.rid)
    if restore is not None:
        if chunked or restore.holds_compute:
            return AddReqResult.CONTINUE
        if req.prefix_len == restore.pointers.position:
            return _admit_split(cache, stock, adder, restore)
        # Others have brought its front back while it waited: plan anew for what is left.
        cache.end(restore, Outcome.RETRACTED)
    if chunked and not _fits_whole(adder, req):
        # A claim shorter than a chunk leaves room for others, but SGLang knows one chunked request.
        return AddReqResult.OTHER
    if req.host_hit_length <= 0:
        return _admit_hit(cache, stock, adder, req)
    choice = _choose(cache, adder, req)
    if isinstance(choice, Fallback):
        return _fall_back(cache, stock, adder, req, choice, chunked)
    return _begin(cache, stock, adder, choice, chunked)


def _begin(
    cache: CacheFlowRadixCache,
    stock: Callable[[], Any],
    adder: Any,
    choice: Restore,
    chunked: bool,
) -> Any:
    if choice.plan.way is Way.LOAD or (choice.plan.way is Way.SPLIT and chunked):
        return _load_in_queue(cache, stock, adder, choice, chunked)
    if chunked or (choice.plan.way is Way.RECOMPUTE and not choice.probe):
        return _admit_recompute(cache, stock, adder, choice, chunked)
    return _admit_split(cache, stock, adder, choice)


def add_chunked_req(add: Add, adder: Any, req: Any) -> Any:
    """Around `PrefillAdder.add_chunked_req`: the next claim of the restore, or the jump.

    Returns `req` without admitting it where the restore waits for a load (SGLang calls that
    parked); the chunked request's `extend_end` is then its `prefix_len`.
    """
    cache = adder.tree_cache
    restore = cache.restores.get(req.rid) if isinstance(cache, CacheFlowRadixCache) else None
    if restore is None:
        return add(adder, req)
    _meet(cache, adder, restore)
    pointers = restore.pointers
    if pointers.finished or _is_plain_recompute(restore):
        _end(cache, restore)
        return add(adder, req)
    if pointers.gap == 0:
        _reserve_rest(adder, restore)
        return req
    limit = page_floor(
        min(adder.rem_chunk_tokens, adder.chunked_req_limit or adder.rem_chunk_tokens),
        cache.page_size,
    )
    if limit < cache.page_size:
        _end(cache, restore)
        return add(adder, req)
    claim = pointers.claim_compute(min(limit, cache.compute_claim_size(restore)))
    if claim is None:
        _reserve_rest(adder, restore)
        return req
    adder.chunked_req_limit = claim.tokens
    with _credited(adder, claim.tokens + max(0, -int(adder.rem_total_tokens))):
        result = add(adder, req)
    computed = req.extend_end - claim.start if _is_admitted(adder, req) else 0
    _settle(cache, restore, claim.start, computed)
    _reserve_rest(adder, restore)
    return result


def _choose(cache: CacheFlowRadixCache, adder: Any, req: Any) -> Restore | Fallback:
    """A planned restore with its host nodes pinned, or why there is none."""
    policy = cache.policy_of(req)
    if policy is Policy.SGLANG:
        return Fallback.POLICY
    if not request_is_supported(req):
        return Fallback.REQUEST_KIND
    host = cache.host_span_of(req)
    if host is None:
        return Fallback.HOST_SPAN
    if adder.rem_chunk_tokens < cache.page_size and not adder.can_run_list:
        return Fallback.SMALL_CHUNK
    plan, probe = cache.plan(policy, host.span)
    return cache.new_restore(req, host, policy, plan, probe=probe)


def _fall_back(
    cache: CacheFlowRadixCache,
    stock: Callable[[], Any],
    adder: Any,
    req: Any,
    reason: Fallback,
    chunked: bool,
) -> Any:
    """SGLang's own way. Its load-back may bring nothing; then too the request must fit."""
    if chunked and not _fits_whole(adder, req, loaded=0):
        return AddReqResult.OTHER
    verdict = stock()
    if _is_admitted(adder, req):
        cache.note_fallback(req, reason)
    return verdict


def _load_in_queue(
    cache: CacheFlowRadixCache,
    stock: Callable[[], Any],
    adder: Any,
    restore: Restore,
    chunked: bool,
) -> Any:
    """Load the prefix while the request waits; it takes no part in this step.

    Either all of it is to be loaded, or the request is to be split and another one is computed in
    chunks now: then it becomes a split as soon as that is done.
    """
    req = restore.req
    with adder._lock_node(req.last_node):
        verdict = adder._select_prefill_admission(
            req,
            total_tokens=_total_tokens(adder, req),
            host_hit_length=req.host_hit_length,
            swa_host_hit_length=0,
            truncation_align_size=None,
        )
    if isinstance(verdict, AddReqResult):
        cache.discard(restore)
        return verdict
    restore.lock = cache.lock(req.last_node)
    if not cache.take_slots(restore):
        cache.discard(restore)
        return _fall_back(cache, stock, adder, req, Fallback.NO_MEMORY, chunked)
    cache.start(restore, admitted=False)
    return AddReqResult.CONTINUE


def _admit_recompute(
    cache: CacheFlowRadixCache,
    stock: Callable[[], Any],
    adder: Any,
    restore: Restore,
    chunked: bool,
) -> Any:
    """Compute it all, as if the host had nothing."""
    restore.req.host_hit_length = 0
    cache.discard(restore)
    if chunked and not _fits_whole(adder, restore.req):
        return AddReqResult.OTHER
    verdict = stock()
    if _is_admitted(adder, restore.req):
        cache.note_recompute(restore)
    return verdict


def _admit_split(
    cache: CacheFlowRadixCache, stock: Callable[[], Any], adder: Any, restore: Restore
) -> Any:
    """Admit the first compute claim as a chunk, and load the tail meanwhile.

    `restore` is new, or has been loading in the queue and its loads are late.
    """
    req, pointers, queued = restore.req, restore.pointers, restore.lock is not None
    size = cache.compute_claim_size(restore)
    claim = pointers.claim_compute(min(adder.rem_chunk_tokens, size))  # whole pages of it
    if claim is None:  # the rest is being loaded, or others have filled this step's chunk
        if not queued:
            cache.discard(restore)
        return AddReqResult.CONTINUE if queued else AddReqResult.OTHER
    req.host_hit_length = 0
    held = restore.private.tokens + claim.tokens if queued else 0
    with _credited(adder, held), _capped(adder, claim.tokens):
        verdict = stock()
    if adder.new_chunked_req is not req:
        pointers.return_compute(claim.start)
        if not queued:
            cache.discard(restore)
        return verdict
    computed = req.extend_end - claim.start
    if queued:
        cache.admit(restore)
        _settle(cache, restore, claim.start, computed)
        _reserve_rest(adder, restore)
        return verdict
    pointers.return_compute(claim.start + computed)
    if cache.take_slots(restore):
        cache.start(restore, admitted=True)
        _reserve_rest(adder, restore)
    else:
        cache.discard(restore)
        cache.note_fallback(req, Fallback.NO_MEMORY)
    return verdict


def _admit_hit(cache: CacheFlowRadixCache, stock: Callable[[], Any], adder: Any, req: Any) -> Any:
    """Admit a request without a prefix on the host, or whose prefix was loaded in the queue."""
    verdict = stock()
    if _is_admitted(adder, req) and (loaded := cache.loaded_while_queued(req)):
        # SGLang takes it for a device hit; `cached_tokens_details` should say where it came from.
        req.host_hit_length = req.host_loaded_length = min(loaded, req.prefix_len)
    return verdict


def _meet(cache: CacheFlowRadixCache, adder: Any, restore: Restore) -> None:
    """Jump where the pointers have met; if loads are on their way, wait where nobody else waits."""
    pointers = restore.pointers
    deadline_s = time.perf_counter() + _LONGEST_WAIT_S
    alone = not adder.running_batch.reqs and not adder.waiting_queue_len
    cache.jump(restore)
    while pointers.meeting and alone and (left := deadline_s - time.perf_counter()) > 0:
        restore.waits(time.perf_counter())
        pointers.wait_for_change(left)
        cache.jump(restore)
    if pointers.meeting:
        restore.waits(time.perf_counter())
    else:
        restore.goes_on(time.perf_counter())


def _end(cache: CacheFlowRadixCache, restore: Restore) -> None:
    """The prefix is complete, or SGLang computes the rest of it by itself."""
    loaded = bool(restore.pointers.jumps)
    cache.end(restore, Outcome.RESTORED if loaded else Outcome.RECOMPUTED)


def _settle(cache: CacheFlowRadixCache, restore: Restore, start: int, computed: int) -> None:
    """SGLang has admitted `computed` tokens of the last claim: their slots go, the rest is free."""
    restore.pointers.return_compute(start + computed)
    if computed:
        cache.give_to_compute(restore, Span(start, start + computed))


def _reserve_rest(adder: Any, restore: Restore) -> None:
    """Keep others of this step from the memory that the request needs after its prefix.

    SGLang need not: its chunk fills the step, so nobody is admitted beside it.
    """
    req = restore.req
    rest = _total_tokens(adder, req) - (restore.span.stop - req.prefix_len)
    adder.memory_budget.total_offset += rest


def _is_plain_recompute(restore: Restore) -> bool:
    """Nothing was loaded and nothing will be: SGLang goes on by itself."""
    pointers = restore.pointers
    return (
        pointers.loading_stopped
        and not pointers.loads_in_flight
        and pointers.load_pointer == restore.span.stop
    )


@contextmanager
def _credited(adder: Any, tokens: int) -> Iterator[None]:
    """While open, `tokens` more count as free: slots held for what is being admitted."""
    adder.memory_budget.total_offset -= tokens
    adder.memory_budget.current_offset -= tokens
    try:
        yield
    finally:
        adder.memory_budget.total_offset += tokens
        adder.memory_budget.current_offset += tokens


@contextmanager
def _capped(adder: Any, tokens: int) -> Iterator[None]:
    """While open, at most `tokens` fit into this step's chunk; what was used is paid after."""
    before = adder.rem_chunk_tokens
    adder.rem_chunk_tokens = tokens
    try:
        yield
    finally:
        adder.rem_chunk_tokens += before - tokens


def _fits_whole(adder: Any, req: Any, loaded: int | None = None) -> bool:
    """Whether what is left to compute fits into this step; `loaded`: tokens that the host gives."""
    given = req.host_hit_length if loaded is None else loaded
    rest = len(req.full_untruncated_fill_ids) - req.prefix_len - given
    return adder.rem_chunk_tokens is None or adder.ceil_paged_tokens(rest) <= adder.rem_chunk_tokens


def _is_admitted(adder: Any, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def _total_tokens(adder: Any, req: Any) -> int:
    """What `add_one_req` reserves for a request with its prefix on the device."""
    rest: int = len(req.full_untruncated_fill_ids) - req.prefix_len
    to_come = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    overhead: int = adder.per_req_token_overhead
    return rest + min(int(to_come), int(CLIP_MAX_NEW_TOKENS)) + overhead
