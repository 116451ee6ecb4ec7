"""Restores on a real radix cache with real pools, driven step by step without a server."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.plans import Plan, Way
from cacheflow_sgl.core.policies import Policy
from cacheflow_sgl.core.report import Outcome

pytestmark = pytest.mark.engine

PREFIX = 512
PAGES = (1, 16, 64)


@pytest.fixture(params=PAGES, ids="page {}".format)
def stand(request, make_stand):
    """Each test here runs at every page size, and must leave every slot with one owner."""
    made = make_stand(page=request.param)
    yield made
    made.check()


@pytest.fixture
def prefix(stand):
    """Tokens of a prefix in three nodes, on the host alone."""
    tokens = stand.tokens(1, 4 * stand.page * (PREFIX // stand.page // 4))
    stand.put_on_host(tokens, nodes=4)
    return tokens


def end_all(stand):
    for restore in list(stand.cache.restores.values()):
        stand.cache.end(restore, Outcome.ABORTED)


# -- pins and slots


def test_a_new_restore_pins_every_node_of_its_span(stand, prefix):
    restore = stand.restore_of(prefix)
    assert restore.span == Span(0, PREFIX)
    assert len(restore.host.nodes) == stand.cache.host_pins == 4
    stand.evict_host()
    assert stand.matched(prefix) == (0, PREFIX), "a pinned host page was evicted"
    stand.cache.discard(restore)
    stand.check_at_rest()
    assert stand.matched(prefix) == (0, 0)


def test_loads_go_on_from_the_host_when_others_bring_a_part_back(stand, prefix):
    """Whatever the host evicts then, it is nothing that a load may be reading."""
    loads = stand.step_loads()
    restore = stand.loads_while_queued(prefix)
    stand.serve([*prefix[: PREFIX // 2], 8], "sglang", "other")
    stand.evict_host()
    loads.run()
    stand.cache.check_hicache_events()
    assert stand.matched(prefix) == (PREFIX, 0)
    stand.serve([*prefix, 7], "load", "r")
    assert restore.pointers.loaded_tokens == PREFIX
    stand.check_at_rest()


def test_slots_are_private_and_come_back(stand, prefix):
    free = stand.allocator.available_size()
    restore = stand.restore_of(prefix)
    assert stand.cache.take_slots(restore)
    assert stand.allocator.available_size() == free - PREFIX
    assert restore.private == Span(0, PREFIX)
    assert restore.device_slots.unique().numel() == PREFIX
    stand.cache.start(restore, admitted=True)
    stand.check()
    assert stand.cache.private_tokens == PREFIX
    assert stand.matched(prefix) == (0, PREFIX), "others see what is not there yet"
    report = stand.cache.end(restore, Outcome.ABORTED)
    assert report.outcome == "aborted"
    assert stand.cache.private_tokens == 0
    stand.check_at_rest()


def test_slots_only_for_what_compute_has_not_claimed(stand, prefix):
    restore = stand.restore_of(prefix)
    claim = restore.pointers.claim_compute(128)
    assert stand.cache.take_slots(restore)
    assert restore.private == Span(claim.stop, PREFIX)
    assert restore.device_slots.numel() == PREFIX - claim.tokens
    stand.cache.start(restore, admitted=True)
    stand.check()
    end_all(stand)
    stand.check_at_rest()


def test_slots_are_taken_from_the_tree_when_none_are_free(stand, prefix):
    other = stand.tokens(2, stand.slots)
    stand.put_on_device(other)
    assert stand.allocator.available_size() == 0
    restore = stand.restore_of(prefix)
    assert stand.cache.take_slots(restore)
    stand.cache.start(restore, admitted=True)
    stand.check()
    end_all(stand)


def test_without_memory_nothing_is_held(stand, prefix):
    held = stand.allocator.alloc(stand.slots - PREFIX + stand.page)
    restore = stand.restore_of(prefix)
    assert not stand.cache.take_slots(restore)
    assert stand.allocator.available_size() == PREFIX - stand.page
    assert restore.private.tokens == 0
    stand.cache.discard(restore)
    stand.allocator.free(held)
    stand.check_at_rest()


def test_a_compute_claim_gives_its_slots_to_sglang(stand, prefix):
    stand.step_loads()
    restore = stand.restore_of(prefix)
    assert stand.cache.take_slots(restore)
    stand.cache.start(restore, admitted=True)
    free = stand.allocator.available_size()
    stand.cache.give_to_compute(restore, restore.pointers.claim_compute(128))
    assert stand.allocator.available_size() == free + 128
    stand.check()
    end_all(stand)
    stand.check_at_rest()


def test_the_device_part_of_the_prefix_stays_while_the_rest_loads(stand, prefix):
    stand.step_loads()
    stand.serve([*prefix[: PREFIX // 4], 8], "recompute", "other")
    restore = stand.loads_while_queued(prefix)
    assert restore.span == Span(PREFIX // 4, PREFIX)
    stand.evict_device()
    assert stand.matched(prefix) == (PREFIX // 4, 3 * PREFIX // 4)
    end_all(stand)
    stand.check_at_rest()


# -- a prefix loaded whole while its request waits


@pytest.mark.parametrize("policy", ["sglang", "recompute"])
@pytest.mark.parametrize("brought", [0, PREFIX // 4, PREFIX // 2, PREFIX], ids="{} back".format)
def test_publish(stand, prefix, brought, policy):
    """Others may have loaded or computed any front part of it meanwhile, or all of it."""
    loads = stand.step_loads()
    restore = stand.loads_while_queued(prefix)
    if brought:
        stand.serve([*prefix[:brought], 8], policy, "other")
    assert stand.matched(prefix) == (brought, PREFIX - brought)
    loads.run()
    stand.cache.check_hicache_events()
    assert not stand.cache.restores
    assert stand.matched(prefix) == (PREFIX, 0)
    assert stand.cache.host_pins == 0
    stand.check()
    report = restore.req.customized_info["cacheflow_restore"][0]
    assert report["outcome"] == "restored"
    assert (report["meetings"], report["loaded_tokens"]) == ([0], PREFIX)
    req = stand.serve([*prefix, 7], "load", "r")
    assert req.host_loaded_length == PREFIX, "told as a device hit"
    stand.check_at_rest()


def test_a_part_brought_back_in_the_middle_of_a_node(stand):
    """SGLang splits the node; host pages, pins and anchor stay what they were."""
    tokens = stand.tokens(1, PREFIX)
    stand.put_on_host(tokens)
    loads = stand.step_loads()
    restore = stand.loads_while_queued(tokens)
    loads.begin()
    stand.serve([*tokens[:192], 8], "recompute", "other")
    loads.run()
    assert restore.pointers.loaded_tokens == PREFIX
    stand.cache.check_hicache_events()
    assert stand.matched(tokens) == (PREFIX, 0)
    stand.serve([*tokens, 7], "load", "r")
    stand.check_at_rest()


def test_host_pages_that_moved_are_not_published(stand, prefix):
    """What was read is then not known to be what the node holds."""
    loads = stand.step_loads()
    restore = stand.loads_while_queued(prefix)
    loads.run()
    restore.host.slots[-1] += 1
    stand.cache.check_hicache_events()
    assert not stand.cache.restores
    assert stand.matched(prefix) == (0, PREFIX)
    stand.cache._end_of("r", Outcome.ABORTED)
    stand.check_at_rest()


def test_a_request_is_held_back_only_by_its_own_load(stand, prefix):
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    loads = stand.step_loads()
    restore = stand.loads_while_queued(prefix)
    ours, other = restore.req.cache_request_handle, CacheRequestHandle("other", 0)
    assert not stand.cache.check_prefetch_progress(ours)
    assert stand.cache.check_prefetch_progress(other)
    restore.late = True
    assert stand.cache.check_prefetch_progress(ours)
    restore.late = False
    loads.run()
    assert not stand.cache.check_prefetch_progress(ours), "landed, but not in the tree yet"
    stand.cache.check_hicache_events()
    assert stand.cache.check_prefetch_progress(ours)
    stand.serve([*prefix, 7], "load", "r")
    stand.check_at_rest()


def test_a_load_that_fails_in_the_queue_ends_in_a_recompute(stand, prefix):
    loads = stand.step_loads()
    restore = stand.loads_while_queued(prefix)
    stand.transfers.fail_next = 1
    assert loads.begin()
    loads.finish()
    loads.begin()
    stand.cache.check_hicache_events()
    assert not stand.cache.restores
    assert stand.cache.host_pins == 0
    stand.check()
    report = stand.cache.reports[-1]
    assert (report.outcome, report.failed_loads) == ("retracted", 1)
    assert restore.req.customized_info is None, "it is told when its request has been served"
    assert stand.cache.policy_of(restore.req) is Policy.RECOMPUTE
    req = stand.serve([*prefix, 7], "load", "r")
    assert req.customized_info["cacheflow_restore"][0]["way"] == "recompute"
    assert stand.cache.policy_of(stand.request([*prefix, 7], "load", "r")) is Policy.LOAD
    stand.check_at_rest()


def test_a_load_that_can_never_end_ends_in_a_recompute(stand, prefix):
    """The lane has given it up without a failed load: nobody else would wake its request."""
    stand.step_loads()
    restore = stand.loads_while_queued(prefix)
    restore.pointers.stop_loading()
    stand.cache.check_hicache_events()
    assert not stand.cache.restores
    stand.serve([*prefix, 7], "load", "r")
    stand.check_at_rest()


def known_costs(stand):
    """A link that needs 1 ms for 64 tokens, and a forward that needs 10 ms for a chunk."""
    costs = stand.cache.planner.costs
    costs.link.observe(64 * costs.bytes_per_token, 0.001)
    costs.compute.observe(0, stand.chunk, 0.01)


def test_the_watchdog(stand, prefix):
    """A queued load that takes far longer than predicted is left to both lanes."""
    stand.step_loads()
    restore = stand.loads_while_queued(prefix)
    restore.first_load_s = restore.began_s - 1000
    stand.cache.check_hicache_events()
    assert not restore.late, "late without knowing what to expect"
    end_all(stand)
    known_costs(stand)
    restore = stand.loads_while_queued(prefix)
    restore.began_s -= 1000
    stand.cache.check_hicache_events()
    assert not restore.late, "the lane has not come to it yet"
    restore.first_load_s = restore.began_s + 1000
    stand.cache.check_hicache_events()
    assert not restore.late
    restore.first_load_s -= 1000
    stand.cache.check_hicache_events()
    assert restore.late
    assert not restore.holds_compute
    assert stand.cache.restores, "a late load goes on"
    end_all(stand)
    stand.check_at_rest()


def test_the_watchdog_looks_at_the_load_under_way(stand, prefix):
    stand.step_loads()
    known_costs(stand)
    restore = stand.loads_while_queued(prefix)
    restore.loading = (Span(448, 512), restore.began_s - 1000)
    stand.cache.check_hicache_events()
    assert restore.late
    end_all(stand)
    stand.check_at_rest()


# -- memory pressure


def test_waiting_restores_give_way_youngest_first(stand, prefix):
    stand.step_loads()
    other = stand.tokens(2, PREFIX)
    stand.put_on_host(other)
    elder = stand.loads_while_queued(prefix, "elder")
    younger = stand.loads_while_queued(other, "younger")
    stand.put_on_device(stand.tokens(3, PREFIX))
    free = stand.allocator.available_size()
    stand.allocator.evict_to_free_tokens(stand.cache, free + PREFIX)
    assert set(stand.cache.restores) == {"elder", "younger"}, "the tree had enough"
    stand.allocator.evict_to_free_tokens(stand.cache, free + PREFIX + stand.page)
    assert set(stand.cache.restores) == {"elder"}
    assert [(report.rid, report.outcome) for report in stand.cache.reports] == [
        ("younger", "retracted")
    ]
    assert younger.req.customized_info is None
    stand.check()
    stand.allocator.evict_to_free_tokens(stand.cache, stand.slots)
    assert not stand.cache.restores
    assert elder.lock is None
    stand.check_at_rest()


def test_an_admitted_restore_never_gives_way(stand, prefix):
    stand.step_loads()
    restore = stand.restore_of(prefix)
    assert stand.cache.take_slots(restore)
    stand.cache.start(restore, admitted=True)
    stand.allocator.evict_to_free_tokens(stand.cache, stand.slots)
    assert set(stand.cache.restores) == {"r"}
    end_all(stand)
    stand.check_at_rest()


# -- the jump


def admitted(stand, tokens):
    """A request that SGLang computes in chunks, its first chunk done, and its restore."""
    req = stand.request([*tokens, *stand.tokens(9, 70)], "split")
    stand.waiting.append(req)
    stand.step()
    assert stand.chunked is req
    return req, stand.cache.restores["r"]


def test_the_jump_gives_the_row_what_was_loaded(stand, prefix):
    loads = stand.step_loads()
    req, restore = admitted(stand, prefix)
    first = req.prefix_len
    assert 0 < first < PREFIX
    stand.cache.jump(restore)
    assert req.prefix_len == first, "a jump before the pointers met"
    req.storage_hit_start, req.storage_hit_length = PREFIX - 100, 70
    loads.run()
    stand.cache.jump(restore)
    assert req.prefix_len == req.extend_end == PREFIX
    assert req.kv.kv_allocated_len == req.kv.kv_committed_len == PREFIX
    assert (req.cached_tokens_storage, req.cached_tokens_host) == (70, PREFIX - first - 70)
    assert restore.private.tokens == 0
    stand.assert_row_right(req, PREFIX)
    stand.check()
    stand.run()
    assert req.customized_info["cacheflow_restore"][0]["meetings"] == [first]
    stand.finish(req)
    stand.check_at_rest()


@pytest.mark.parametrize("brought", [PREFIX // 2, PREFIX])
@pytest.mark.parametrize("jumped", [False, True], ids=["before the jump", "after the jump"])
def test_others_put_the_same_tokens_into_the_tree_first(stand, prefix, brought, jumped):
    """Our copies are freed once, by SGLang's own insert, and the row uses theirs."""
    loads = stand.step_loads()
    req, restore = admitted(stand, prefix)
    loads.run()
    if jumped:
        stand.cache.jump(restore)
    stand.put_on_device(prefix[:brought])
    stand.check()
    stand.run()
    stand.finish(req)
    stand.check_at_rest()


def test_an_abort_just_after_the_jump(stand, prefix):
    loads = stand.step_loads()
    req, restore = admitted(stand, prefix)
    loads.run()
    stand.cache.jump(restore)
    stand.abort(req)
    assert req.customized_info["cacheflow_restore"][0]["outcome"] == "aborted"
    stand.check_at_rest()


# -- how a restore can end


def test_a_request_gives_its_row_back(stand, prefix):
    stand.step_loads()
    req, _ = admitted(stand, prefix)
    stand.abort(req)
    assert req.customized_info["cacheflow_restore"][0]["outcome"] == "aborted"
    stand.check_at_rest()
    stand.put_on_host(prefix, nodes=4)
    req, _ = admitted(stand, prefix)
    stand.retract(req)
    assert stand.cache.reports[-1].outcome == "retracted"
    assert req.customized_info is None
    stand.waiting.clear()
    stand.check_at_rest()


def test_a_request_ends_in_the_queue(stand, prefix):
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome

    stand.step_loads()
    restore = stand.loads_while_queued(prefix)
    handle = restore.req.cache_request_handle
    stand.cache.finish(handle, CacheRequestOutcome.SUCCESS)
    assert stand.cache.restores, "its request goes on"
    stand.cache.finish(handle, CacheRequestOutcome.ABORT)
    assert restore.req.customized_info["cacheflow_restore"][0]["outcome"] == "aborted"
    stand.check_at_rest()


def test_a_request_ends_after_its_prefix_was_published(stand, prefix):
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome

    loads = stand.step_loads()
    restore = stand.loads_while_queued(prefix)
    loads.run()
    stand.cache.check_hicache_events()
    stand.cache.finish(restore.req.cache_request_handle, CacheRequestOutcome.ABORT)
    stand.check_at_rest()


def in_the_background(call, *args):
    thread = threading.Thread(target=call, args=args, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("way", ["end", "reset"])
def test_nothing_is_freed_while_a_load_may_still_write(stand, prefix, way):
    restore = stand.restore_of(prefix)
    assert stand.cache.take_slots(restore)
    stand.transfers.hold()
    stand.cache.start(restore, admitted=True)
    stand.transfers.wait_until_held()
    free = stand.allocator.available_size()
    ends = {"end": (stand.cache.end, restore, Outcome.ABORTED), "reset": (stand.cache.reset,)}
    ending = in_the_background(*ends[way])
    ending.join(0.05)
    assert ending.is_alive(), "it did not wait for the load"
    assert stand.allocator.available_size() == free
    stand.transfers.release()
    ending.join(10)
    assert not ending.is_alive()
    assert not stand.cache.restores
    assert len(stand.transfers.done) == 1, "a load began after the end"
    if way == "reset":
        stand.allocator.clear()
        stand.cache.host_pins = 0
    stand.check_at_rest()


def test_reset_forgets_what_waits(stand, prefix):
    stand.step_loads()
    stand.loads_while_queued(prefix)
    stand.cache.reset()
    stand.allocator.clear()
    stand.cache.host_pins = 0
    stand.check_at_rest()
    stand.put_on_host(prefix)
    stand.serve([*prefix, 7], "recompute", "r")
    stand.check_at_rest()


def test_shutdown_ends_the_lane(make_stand):
    stand = make_stand()
    tokens = stand.tokens(1, PREFIX)
    stand.put_on_host(tokens)
    stand.serve([*tokens, 7], "split", "r")
    lane = stand.cache._loader._thread
    assert lane.is_alive()
    stand.cache.shutdown()
    assert not lane.is_alive()


# -- decisions


def test_which_policy_decides(make_stand):
    from cacheflow_sgl.engine.options import Options

    stand = make_stand()
    stand.cache.chosen = Options(restore=Policy.CAKE)

    def asked(custom):
        sampling = SimpleNamespace(custom_params=custom)
        return stand.cache.policy_of(SimpleNamespace(rid="r", sampling_params=sampling))

    assert asked({"cacheflow_restore": "load"}) is Policy.LOAD
    for unknown in ("?", None, 3, []):
        assert asked({"cacheflow_restore": unknown}) is Policy.CAKE
    for nothing in (None, {}, {"other": 1}):
        assert asked(nothing) is Policy.CAKE
    stand.cache.chosen = None
    assert asked({"cacheflow_restore": "load"}) is Policy.SGLANG, "no storage backend of ours"


def test_what_is_too_short_is_left_to_sglang(stand):
    least = max(64, 2 * stand.page)
    tokens = stand.tokens(1, least)
    stand.put_on_host(tokens)
    assert stand.cache.host_span_of(stand.request([*tokens, 7])).span == Span(0, least)
    stand.evict_host()
    shorter = stand.tokens(2, least - stand.page)
    stand.put_on_host(shorter)
    assert stand.cache.host_span_of(stand.request([*shorter, 7])) is None


def test_the_host_span_names_slots_and_nodes_in_order(stand, prefix):
    loads = stand.step_loads()
    restore = stand.loads_while_queued(prefix)
    host = restore.host
    assert host.anchor == host.nodes[-1] == restore.req.best_match_node
    loads.begin(64)
    ((_, claim),) = loads._under_way
    assert claim == Span(PREFIX - 64, PREFIX)
    assert restore.host_slots_of(claim).tolist() == host.slots[-64:].tolist()
    loads.finish()
    want = stand._kv(prefix[-64:], claim.start)
    assert (stand.pool.k_buffer[0][restore.device_slots[-64:]].cpu() == want).all()
    assert restore.loaded_bytes == 64 * stand.cache.planner.costs.bytes_per_token
    end_all(stand)


def test_one_recompute_in_eight_probes_the_link(make_stand):
    cache = make_stand().cache
    plans = {Policy.CACHEFLOW: Way.RECOMPUTE, Policy.RECOMPUTE: Way.RECOMPUTE}

    class Planned:
        def plan(self, policy, span):
            return Plan(plans[policy], "as told", span.stop, {})

    cache.planner = Planned()
    span = Span(0, PREFIX)
    asked = []
    for _ in range(24):
        probes = [cache.plan(Policy.CACHEFLOW, span)[1] for _ in range(3)]
        assert len(set(probes)) == 1, "a request that waits is planned in each step"
        asked.append(probes[0])
        cache._recomputes += 1
    assert asked == ([False] * 7 + [True]) * 3
    assert not any(cache.plan(Policy.RECOMPUTE, span)[1] for _ in range(24)), "it was asked for"
    plans[Policy.CACHEFLOW] = Way.LOAD
    assert not any(cache.plan(Policy.CACHEFLOW, span)[1] for _ in range(24))


def test_a_probe_loads_one_page(stand, prefix):
    loads = stand.step_loads()
    req = stand.request([*prefix, 7])
    host = stand.cache.host_span_of(req)
    plan, _ = stand.cache.plan(Policy.RECOMPUTE, host.span)
    restore = stand.cache.new_restore(req, host, Policy.CACHEFLOW, plan, probe=True)
    assert stand.cache.take_slots(restore)
    stand.cache.start(restore, admitted=True)
    loads.run()
    assert restore.pointers.loaded_tokens == stand.page
    assert restore.pointers.loading_stopped
    end_all(stand)
    stand.check_at_rest()


def test_forwards_teach_the_planner_and_fill_the_lane(stand, prefix):
    stand.step_loads()
    _, restore = admitted(stand, prefix)
    rows = [("r", Span(0, 128)), ("other", Span(0, 64))]
    stand.cache.clock.run(lambda: None, rows)
    assert not stand.cache.planner.costs.compute.known
    stand.cache.check_hicache_events()
    assert stand.cache.planner.costs.compute.known
    assert [span for _, span in restore.compute_lane.busy] == [Span(0, 128)]
    stand.abort(restore.req)


def test_loads_teach_the_planner(stand, prefix):
    loads = stand.step_loads()
    stand.loads_while_queued(prefix)
    assert not stand.cache.planner.costs.link.known
    loads.run()
    assert stand.cache.planner.costs.link.known
    end_all(stand)


def test_forwards_in_flight_count_until_they_end(make_stand):
    stand = make_stand()
    known_costs(stand)
    clock, cost = stand.cache.clock, stand.cache.planner.costs.compute
    assert stand.cache._compute_in_flight_s(0.0) == 0
    inside = []

    def forward():
        now = clock.running()[0].launched_s
        inside.extend(stand.cache._compute_in_flight_s(now + late) for late in (0, 0.004, 9))

    clock.run(forward, [("r", Span(0, 128))])
    whole = cost.seconds(0, 128)
    assert inside == pytest.approx([whole, whole - 0.004, 0])


def test_loads_in_flight_count_until_they_land(stand, prefix):
    stand.step_loads()
    restore = stand.loads_while_queued(prefix)
    restore.loading = (Span(448, 512), 100.0)
    assert stand.cache._load_in_flight(restore, 100.0) == 0, "nothing is known of the link"
    known_costs(stand)
    takes = stand.cache.planner.costs.load_s(64)
    shares = [stand.cache._load_in_flight(restore, 100 + takes * done) for done in (0, 0.5, 1, 5)]
    assert shares == [64, 32, 0, 0]
    restore.loading = None
    assert stand.cache._load_in_flight(restore, 100.0) == 0
    end_all(stand)


# -- checks and set-up


def test_contradictions_are_found(stand, prefix):
    stand.step_loads()
    restore = stand.loads_while_queued(prefix)

    def found(what):
        with pytest.raises(AssertionError, match=what):
            stand.cache.check_integrity()

    restore.req.rid = "another"
    found("is filed under")
    restore.req.rid = "r"
    pin = restore.pins.pop()
    found("not pinned")
    restore.pins.append(pin)
    lock, restore.lock = restore.lock, None
    found("holds no lock")
    restore.lock = lock
    slots, restore.device_slots = restore.device_slots, restore.device_slots[1:]
    found("device slots end")
    restore.device_slots = slots
    stand.cache.check_integrity()
    end_all(stand)


def test_two_chunked_requests_are_a_contradiction(stand, prefix):
    stand.step_loads()
    for rid in ("a", "b"):
        restore = stand.restore_of(prefix, rid=rid)
        assert stand.cache.take_slots(restore)
        stand.cache.start(restore, admitted=True)
    with pytest.raises(AssertionError, match="two chunked"):
        stand.cache.check_integrity()
    end_all(stand)


def test_when_the_cache_is_ours():
    from cacheflow_sgl.engine import radix_cache

    def made(hicache=True, disabled=False, **asked):
        ctx = SimpleNamespace(enable_hierarchical_cache=hicache, disable_radix_cache=disabled)
        return radix_cache.create(lambda ctx, *, cache_class: cache_class, ctx, **asked)

    assert made() is radix_cache.CacheFlowRadixCache
    assert made(hicache=False) is None
    assert made(disabled=True) is None
    assert made(cache_class=dict) is dict


def test_the_worker_times_its_forwards_for_our_cache(make_stand):
    from cacheflow_sgl.engine import forward_clock, radix_cache

    cache, worker = make_stand().cache, SimpleNamespace()
    ctx = SimpleNamespace(
        enable_hierarchical_cache=True, disable_radix_cache=False, tp_worker=worker
    )
    assert radix_cache.create(lambda ctx, *, cache_class: cache, ctx) is cache
    assert getattr(worker, forward_clock.ATTRIBUTE) is cache.clock


def test_a_server_outside_the_envelope_is_left_to_sglang(make_stand, monkeypatch, caplog):
    from cacheflow_sgl.engine import radix_cache

    monkeypatch.setattr(radix_cache, "unsupported_server", lambda args, cache: "a reason")
    with caplog.at_level("INFO", logger=radix_cache.__name__):
        stand = make_stand()
    assert sum("with a reason" in line for line in caplog.messages) == 1
    assert stand.cache.planner is None
    tokens = stand.tokens(1, PREFIX)
    stand.put_on_host(tokens)
    req = stand.serve([*tokens, 7], "split", "r")
    assert req.customized_info is None
    assert req.host_loaded_length == PREFIX
    stand.check_at_rest()
