"""Restores at SGLang's real admission: what is admitted, charged and held, step by step."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.pointers import TwoPointers

pytestmark = pytest.mark.engine

PREFIX = 512
CHUNK = 128
POLICIES = ("split", "load", "recompute", "cake", "cacheflow", "sglang")


@pytest.fixture
def stand(make_stand):
    """Loads happen when the test says so."""
    made = make_stand(page=16, chunk=CHUNK)
    made.put_on_host(made.tokens(1, PREFIX), nodes=2)
    made.loads = made.step_loads()
    yield made
    made.check()


def ask(stand, policy="split", rid="r", suffix=70, seed=1):
    """A request for the prefix `seed` and a suffix of its own."""
    rest = stand.tokens(sum(rid.encode()), suffix)
    return stand.request([*stand.tokens(seed, PREFIX), *rest], policy, rid)


def rest(suffix=70):
    """What a split of `ask` needs beyond its prefix: its suffix, its new tokens and a page."""
    return suffix + 4 + 16


def report_of(req):
    return req.customized_info["cacheflow_restore"][0]


@contextmanager
def charged(adder, tokens, *, page=0, new=0):
    """The step is charged `tokens` of compute and memory, and of memory `page` more at once and
    `new` later on."""
    budget = adder.memory_budget

    def left():
        return (
            adder.rem_chunk_tokens,
            adder.rem_input_tokens,
            -budget.current_offset,
            -budget.total_offset,
        )

    before = left()
    yield
    spent = [was - now for was, now in zip(before, left(), strict=True)]
    assert spent == [tokens, tokens, tokens + page, tokens + page + new]


def hand_over(stand, adder):
    """What the scheduler does with what was admitted."""
    if adder.new_chunked_req is not None:
        stand.chunked = adder.new_chunked_req
    stand.forward(adder)
    stand.check()


# -- every way, whole


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page", [1, 16, 64])
def test_every_way_gives_the_right_row(make_stand, page, policy):
    """With the real I/O thread; `Stand` compares the KV of every row it computes on."""
    stand = make_stand(page=page, chunk=CHUNK)
    tokens = stand.tokens(1, PREFIX)
    for suffix in (1, 70, 3 * CHUNK):
        stand.put_on_host(tokens)
        stand.serve([*tokens, *stand.tokens(2, suffix)], policy, "r")
    stand.check_at_rest()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_that_is_partly_on_the_device(stand, policy):
    stand.serve([*stand.tokens(1, PREFIX)[:192], 8], "recompute", "other")
    assert stand.matched(stand.tokens(1, PREFIX)) == (192, PREFIX - 192)
    req = ask(stand, policy)
    stand.waiting.append(req)
    while stand.waiting or stand.chunked:
        stand.step()
        stand.check()
        stand.loads.run()
    if policy not in ("sglang",):
        assert (report_of(req)["start"], report_of(req)["stop"]) == (192, PREFIX)
    stand.finish(req)
    stand.check_at_rest()


def test_several_requests_with_one_prefix_and_with_several(make_stand):
    stand = make_stand(page=16, chunk=CHUNK, slots=4096)
    for seed in (1, 2):
        stand.put_on_host(stand.tokens(seed, PREFIX), nodes=4)
    asked = [
        ask(stand, policy, f"{policy}-{seed}", seed=seed)
        for policy in ("split", "load", "recompute", "cake")
        for seed in (1, 2)
    ]
    stand.run(*asked)
    for req in list(stand.prefilled):
        stand.finish(req)
    stand.check_at_rest()


# -- the first chunk of a split


def test_the_first_claim_is_admitted_as_a_chunk(stand):
    req, adder = ask(stand), stand.adder()
    with charged(adder, CHUNK, page=16, new=rest()):
        stand.add(adder, req)
    assert adder.new_chunked_req is req
    assert (req.prefix_len, req.extend_end, req.host_hit_length) == (0, CHUNK, 0)
    restore = stand.cache.restores["r"]
    assert restore.private == Span(CHUNK, PREFIX)
    assert restore.admitted
    hand_over(stand, adder)


def test_the_first_claim_is_whole_pages_of_a_mixed_chunk(stand):
    req, adder = ask(stand), stand.adder(mixed=5)
    assert adder.rem_chunk_tokens % 16
    with charged(adder, 112, page=16, new=rest()):
        stand.add(adder, req)
    assert req.extend_end == 112
    hand_over(stand, adder)
    adder = stand.adder(mixed=29)
    stand.chunked = stand.add_chunked(adder, req)
    assert req.extend_end == 112 + 96
    stand.forward(adder)


def test_what_sglang_cuts_off_the_first_claim_is_loaded(stand):
    """Some attention backends truncate chunks to a size of their own."""
    req, adder = ask(stand), stand.adder(mixed=16)
    stand.add(adder, req, align=64)
    assert req.extend_end == 64
    assert stand.cache.restores["r"].private == Span(64, PREFIX)
    hand_over(stand, adder)


def test_a_claim_shorter_than_the_chunk_leaves_room_for_one_that_fits_whole(stand):
    stand.chunk = 512
    req, adder = ask(stand), stand.adder()
    stand.add(adder, req)
    assert req.extend_end == 128, "without an estimate half the gap, but a chunk at most"
    assert adder.rem_chunk_tokens == 384
    long, short = (stand.request(stand.tokens(5, n), None, f"plain {n}") for n in (400, 40))
    assert stand.add(adder, long).name == "OTHER"
    with charged(adder, 48, page=16, new=4):
        stand.add(adder, short)
    assert adder.can_run_list == [req, short]
    assert adder.new_chunked_req is req
    hand_over(stand, adder)


@pytest.mark.parametrize(
    ("policy", "verdict", "queued"),
    [
        ("split", "CONTINUE", True),
        ("load", "CONTINUE", True),
        ("cake", "CONTINUE", True),
        ("recompute", "OTHER", False),
    ],
)
def test_never_a_second_chunked_request(stand, policy, verdict, queued):
    stand.put_on_host(stand.tokens(2, PREFIX))
    first, adder = ask(stand, rid="first"), stand.adder(chunk=512)
    stand.add(adder, first)
    second = ask(stand, policy, "second", seed=2)
    with charged(adder, 0):
        assert stand.add(adder, second).name == verdict
    assert adder.can_run_list == [first]
    assert ("second" in stand.cache.restores) == queued
    if queued:
        assert not stand.cache.restores["second"].admitted
    hand_over(stand, adder)
    adder = stand.adder()
    assert stand.add(adder, second, has_chunked=True).name in (verdict, "OTHER")
    assert not adder.can_run_list


def test_a_recompute_that_fits_whole_joins_a_chunked_request(stand):
    stand.put_on_host(stand.tokens(2, 128))
    first, adder = ask(stand, rid="first"), stand.adder(chunk=512)
    stand.add(adder, first)
    second = stand.request([*stand.tokens(2, 128), 7], "recompute", "second")
    stand.add(adder, second)
    assert adder.can_run_list == [first, second]
    assert second.extend_end == 129
    hand_over(stand, adder)
    assert stand.cache.host_pins == len(stand.cache.restores["first"].pins)


# -- further chunks, parking, the meeting


def chunked(stand, **kw):
    """A split whose first chunk is done, and its restore."""
    req = ask(stand, **kw)
    stand.waiting.append(req)
    stand.step()
    assert stand.chunked is req
    return req, stand.cache.restores[req.rid]


def test_each_further_chunk_is_a_claim(stand):
    req, restore = chunked(stand)
    adder = stand.adder()
    free = stand.allocator.available_size()
    with charged(adder, CHUNK, page=16, new=rest()):
        stand.chunked = stand.add_chunked(adder, req)
    assert stand.chunked is req
    assert (req.prefix_len, req.extend_end) == (CHUNK, 2 * CHUNK)
    assert restore.private == Span(2 * CHUNK, PREFIX)
    assert stand.allocator.available_size() == free + CHUNK, "SGLang takes as many for the forward"
    stand.forward(adder)
    assert stand.allocator.available_size() == free


def test_a_claim_ends_at_the_load_pointer(stand):
    req, restore = chunked(stand)
    while restore.pointers.load_pointer > CHUNK + 48:
        stand.loads.begin(16)
        stand.loads.finish()
    stand.loads.begin(16)
    adder = stand.adder()
    stand.chunked = stand.add_chunked(adder, req)
    assert req.extend_end == restore.pointers.load_pointer == CHUNK + 32


def test_it_is_parked_while_the_last_load_is_under_way(stand):
    """Others are admitted meanwhile; then it jumps, and its suffix is computed."""
    req, restore = chunked(stand)
    while restore.pointers.gap:
        stand.loads.begin()
    other = stand.request(stand.tokens(5, 40), None, "other")
    stand.waiting.append(other)
    adder = stand.adder()
    with charged(adder, 0, new=rest()):
        assert stand.add_chunked(adder, req) is req
    assert not adder.can_run_list
    assert req.extend_end == req.prefix_len == CHUNK
    adder = stand.step()
    assert adder.can_run_list == [other]
    assert restore.waiting_since_s is not None
    while stand.loads.finish():
        pass
    adder = stand.step()
    assert adder.can_run_list == [req]
    assert (req.prefix_len, req.extend_end) == (PREFIX, PREFIX + 70)
    assert stand.chunked is None
    report = report_of(req)
    assert (report["outcome"], report["meetings"]) == ("restored", [CHUNK])
    assert (report["computed_tokens"], report["loaded_tokens"]) == (CHUNK, PREFIX - CHUNK)
    assert report["wait_s"] > 0
    assert not stand.cache.restores
    stand.finish(req)
    stand.finish(other)
    stand.check_at_rest()


def test_a_suffix_longer_than_a_chunk_stays_chunked_after_the_jump(stand):
    req, _ = chunked(stand, suffix=3 * CHUNK)
    stand.loads.run()
    stand.step()
    assert (req.prefix_len, req.extend_end) == (PREFIX + CHUNK, PREFIX + CHUNK)
    assert stand.chunked is req
    assert not stand.cache.restores
    stand.run()
    stand.finish(req)
    stand.check_at_rest()


@pytest.mark.parametrize("busy", ["no", "decodes", "queue"])
def test_a_step_waits_for_the_last_load_only_when_it_has_nothing_else_to_do(
    stand, monkeypatch, busy
):
    req, restore = chunked(stand)
    while restore.pointers.gap:
        stand.loads.begin()
    waited = []

    def wait_for_change(pointers, timeout_s):
        waited.append(timeout_s)
        while stand.loads.finish():
            pass
        return True

    monkeypatch.setattr(TwoPointers, "wait_for_change", wait_for_change)
    adder = stand.adder()
    if busy == "decodes":
        adder.running_batch.reqs = [SimpleNamespace()]
    if busy == "queue":
        adder.waiting_queue_len = 1
    stand.chunked = stand.add_chunked(adder, req)
    if busy == "no":
        assert adder.can_run_list == [req]
        assert req.prefix_len == PREFIX
        assert len(waited) == 1
    else:
        assert not adder.can_run_list
        assert not waited
    stand.forward(adder)


def test_a_step_that_waits_comes_back_to_its_inbox(stand):
    req, restore = chunked(stand)
    while restore.pointers.gap:
        stand.loads.begin()
    assert stand.add_chunked(stand.adder(), req) is req
    assert restore.pointers.meeting


@pytest.mark.parametrize("rest", [0, 15])
def test_a_step_of_less_than_a_page_ends_the_split(stand, rest):
    """SGLang goes on by itself, with what it takes for a step."""
    req, restore = chunked(stand)
    stand.loads.begin(16)
    adder = stand.adder(mixed=CHUNK - rest) if rest else stand.adder(chunk=CHUNK)
    if not rest:
        adder.chunked_req_limit = 15
    stand.chunked = stand.add_chunked(adder, req)
    assert not stand.cache.restores
    assert restore.private.tokens == PREFIX - CHUNK
    assert stand.cache.host_pins == 0
    stand.forward(adder)
    stand.run()
    stand.finish(req)
    stand.check_at_rest()


def test_what_was_loaded_before_a_step_of_less_than_a_page_is_told(stand):
    """The meeting in front of the hole that it computes now; what lies behind is given up."""
    req, _ = chunked(stand)
    stand.loads.begin(128)
    stand.loads.finish()
    fail_one(stand, CHUNK + 32)
    stand.loads.run()
    stand.step()
    assert stand.cache.restores
    adder = stand.adder(mixed=CHUNK - 15)
    stand.chunked = stand.add_chunked(adder, req)
    report = report_of(req)
    assert (report["outcome"], report["meetings"]) == ("restored", [CHUNK])
    stand.forward(adder)
    stand.run()
    stand.finish(req)
    stand.check_at_rest()


def test_a_step_of_less_than_a_page_begins_no_split(stand):
    req, adder = ask(stand), stand.adder(mixed=CHUNK - 15)
    stand.add(adder, req)
    assert not stand.cache.restores
    assert stand.cache.host_pins == 0


def test_a_full_chunk_leaves_the_request_for_the_next_step(stand):
    """It is a split as good as ever then, and not a fallback."""
    adder = stand.adder()
    stand.add(adder, stand.request(stand.tokens(5, CHUNK - 16), None, "plain"))
    adder.rem_chunk_tokens = 15
    req = ask(stand)
    with charged(adder, 0):
        assert stand.add(adder, req).name == "OTHER"
    assert not stand.cache.restores
    assert stand.cache.host_pins == 0
    assert req.customized_info is None
    hand_over(stand, adder)


# -- failures


def fail_one(stand, tokens=16):
    stand.transfers.fail_next = 1
    assert stand.loads.begin(tokens)
    stand.loads.finish()


def test_a_failed_load_is_recomputed_and_the_rest_stays_loaded(stand):
    req, _ = chunked(stand)
    stand.loads.begin(64)
    stand.loads.finish()
    fail_one(stand)
    stand.loads.run()
    stand.run()
    report = report_of(req)
    assert report["meetings"] == [CHUNK, PREFIX - 64]
    assert (report["failed_loads"], report["failed_tokens"]) == (1, 16)
    assert report["computed_tokens"] == CHUNK + 16
    assert report["outcome"] == "restored"
    stand.finish(req)
    stand.check_at_rest()


def test_the_first_load_that_fails_makes_its_end_plain_compute(stand):
    req, _ = chunked(stand)
    fail_one(stand, 64)
    stand.loads.run()
    stand.run()
    report = report_of(req)
    assert report["meetings"] == [CHUNK]
    assert report["computed_tokens"] == CHUNK + 64
    assert report["outcome"] == "restored"
    stand.finish(req)
    stand.check_at_rest()


def test_a_link_that_only_fails_leaves_a_recompute(stand):
    req, _ = chunked(stand)
    for _ in range(3):
        fail_one(stand)
    assert not stand.loads.begin(16), "it gave up"
    stand.run()
    report = report_of(req)
    assert (report["outcome"], report["meetings"], report["failed_loads"]) == ("recomputed", [], 3)
    stand.finish(req)
    stand.check_at_rest()


# -- loaded whole, in the queue


def test_an_all_load_takes_no_part_in_the_step(stand):
    req, adder = ask(stand, "load"), stand.adder()
    with charged(adder, 0):
        assert stand.add(adder, req).name == "CONTINUE"
    restore = stand.cache.restores["r"]
    assert not adder.can_run_list
    assert restore.private == Span(0, PREFIX)
    assert restore.holds_compute
    assert stand.cache.protected_size() == 0, "d is the root here"
    with charged(adder, 0):
        assert stand.add(adder, req).name == "CONTINUE"


def test_it_is_admitted_as_a_device_hit(stand):
    req = ask(stand, "load")
    stand.waiting.append(req)
    stand.step()
    stand.loads.run()
    adder = stand.step()
    assert adder.can_run_list == [req]
    assert (req.prefix_len, req.extend_end) == (PREFIX, PREFIX + 70)
    assert req.host_hit_length == req.host_loaded_length == PREFIX
    assert stand.cache.loaded_while_queued(req) == 0, "told once"
    stand.finish(req)
    stand.check_at_rest()


def test_others_pass_it_in_the_queue(stand):
    slow, other = ask(stand, "load"), stand.request(stand.tokens(5, 40), None, "other")
    stand.waiting += [slow, other]
    adder = stand.step()
    assert adder.can_run_list == [other]
    stand.finish(other)
    stand.abort(slow)
    stand.check_at_rest()


def test_a_late_all_load_becomes_a_split(stand):
    """It holds slots already, which are credited to what its admission is charged."""
    req = ask(stand, "load")
    stand.waiting.append(req)
    stand.step()
    restore = stand.cache.restores["r"]
    stand.loads.begin(64)
    stand.loads.finish()
    restore.late = True
    free = stand.allocator.available_size()
    adder = stand.adder()
    with charged(adder, CHUNK, page=16, new=rest()):
        stand.add(adder, req)
    assert adder.new_chunked_req is req
    assert stand.allocator.available_size() == free + CHUNK
    assert restore.admitted
    assert restore.lock is None
    hand_over(stand, adder)
    stand.loads.run()
    stand.run()
    report = report_of(req)
    assert (report["way"], report["late"], report["meetings"]) == ("load", True, [CHUNK])
    stand.finish(req)
    stand.check_at_rest()


def test_a_late_all_load_needs_no_memory_beyond_what_it_holds(make_stand):
    stand = make_stand(page=16, chunk=CHUNK, slots=PREFIX + 128)
    stand.put_on_host(stand.tokens(1, PREFIX))
    stand.step_loads()
    req = ask(stand, "load", suffix=20)
    stand.waiting.append(req)
    stand.step()
    stand.cache.restores["r"].late = True
    adder = stand.step()
    assert adder.can_run_list == [req]
    stand.abort(req)
    stand.check_at_rest()


def test_a_late_all_load_whose_rest_is_under_way_waits_on(stand):
    req = ask(stand, "load")
    stand.waiting.append(req)
    stand.step()
    restore = stand.cache.restores["r"]
    while stand.loads.begin():
        pass
    restore.late = True
    adder = stand.step()
    assert not adder.can_run_list
    assert stand.cache.restores
    while stand.loads.finish():
        pass
    stand.run()
    assert report_of(req)["outcome"] == "restored"
    stand.finish(req)
    stand.check_at_rest()


@pytest.mark.parametrize("front", [64, 256, PREFIX], ids="front {}".format)
@pytest.mark.parametrize("loaded", [0, 128, 384], ids="loaded {}".format)
def test_a_queued_restore_whose_front_others_have_brought_back(stand, front, loaded):
    """Matched anew, the request begins further on than its restore thinks."""
    req = ask(stand, "load")
    stand.waiting.append(req)
    stand.step()
    for _ in range(loaded // 64):
        stand.loads.begin(64)
        stand.loads.finish()
    stand.put_on_device(stand.tokens(1, PREFIX)[:front])
    stand.cache.restores["r"].late = True
    stand.step()
    stand.check()
    stand.loads.run()
    stand.run()
    stand.finish(req)
    stand.check_at_rest()


def test_two_splits_of_one_prefix_at_once(stand):
    """The second loads in the queue while the first is computed, which publishes their prefix."""
    first, second = ask(stand, rid="first"), ask(stand, rid="second")
    stand.waiting += [first, second]
    while stand.waiting or stand.chunked:
        stand.step()
        stand.check()
        stand.loads.begin(16)
        stand.loads.finish()
    assert report_of(first)["outcome"] == "restored"
    stand.finish(first)
    stand.finish(second)
    stand.check_at_rest()


# -- memory


@pytest.mark.parametrize("policy", POLICIES)
def test_no_room_leaves_nothing_behind(stand, policy):
    held = stand.allocator.alloc(stand.slots - PREFIX)
    req, adder = ask(stand, policy), stand.adder()
    with charged(adder, 0):
        assert stand.add(adder, req).name == "NO_TOKEN"
    assert not adder.can_run_list
    assert adder.new_chunked_req is None
    assert not stand.cache.restores
    assert stand.cache.host_pins == 0
    assert req.customized_info is None
    assert stand.allocator.available_size() == PREFIX
    stand.allocator.free(held)
    stand.check_at_rest()


@pytest.mark.parametrize("policy", ["split", "load"])
def test_slots_that_cannot_be_had_leave_it_to_sglang(stand, monkeypatch, policy):
    """The budget said yes, the allocator says no: fragments, or another pool's share."""
    monkeypatch.setattr(stand.cache, "take_slots", lambda restore: False)
    req, adder = ask(stand, policy), stand.adder()
    stand.add(adder, req)
    assert adder.can_run_list == [req]
    assert report_of(req) == {"policy": "sglang", "way": "sglang", "reason": "no_memory"}
    assert not stand.cache.restores
    hand_over(stand, adder)
    assert stand.cache.host_pins == 0
    stand.run()
    stand.finish(req)
    stand.check_at_rest()


def test_a_chunk_is_whole_however_little_memory_is_left(stand):
    """Its slots are held already; SGLang would cut it to what it thinks is left."""
    req, restore = chunked(stand)
    for left in (40, -60, -200):
        adder = stand.adder()
        adder.memory_budget.total_offset += int(adder.rem_total_tokens) - left
        stand.chunked = stand.add_chunked(adder, req)
        assert req.extend_end - req.prefix_len == restore.pointers.position - req.prefix_len
        assert req.extend_end % 16 == 0
        assert req.extend_end > req.prefix_len
        stand.forward(adder)
        stand.check()


@pytest.mark.parametrize("when", ["parked", "short claim", "first claim", "late"])
def test_nobody_is_admitted_on_the_memory_that_a_split_still_needs(make_stand, when):
    """Its suffix is charged when it is computed, and others fit beside a short claim."""
    stand = make_stand(page=16, chunk=CHUNK, slots=PREFIX + 176)
    stand.put_on_host(stand.tokens(1, PREFIX))
    stand.loads = stand.step_loads()
    req = ask(stand, "load" if when == "late" else "split")
    stand.waiting.append(req)
    other = stand.request(stand.tokens(20, 112), None, "other")
    if when != "first claim":
        stand.step()
        restore = stand.cache.restores["r"]
        while when == "parked" and restore.pointers.gap:
            stand.loads.begin()
        restore.late = when == "late"
    stand.waiting.append(other)
    stand.step(chunk=CHUNK + 112)
    assert stand.chunked is req
    assert other in stand.waiting
    stand.loads.run()
    while req not in stand.prefilled:
        stand.step()
        stand.check()
    stand.finish(req)
    stand.run()
    stand.finish(other)
    stand.check_at_rest()


def test_requests_that_do_not_fit_together_still_all_end(make_stand):
    stand = make_stand(page=16, chunk=CHUNK, slots=PREFIX + 256)
    for seed in (1, 2, 3):
        stand.put_on_host(stand.tokens(seed, PREFIX))
    asked = [
        ask(stand, policy, f"{policy}-{seed}", seed=seed)
        for seed in (1, 2, 3)
        for policy in ("split", "load")
    ]
    stand.waiting += asked
    for _ in range(2000):
        stand.step()
        stand.check()
        for req in list(stand.prefilled):
            stand.finish(req)
        if not stand.waiting and stand.chunked is None:
            break
        stand.cache.wait_for_load(0.001)
    stand.check_at_rest()


# -- what is left to SGLang


def test_what_is_left_to_sglang_says_why(stand):
    stand.put_on_host(stand.tokens(3, 32))
    session = ask(stand, rid="a")
    session.return_hidden_states = True
    short = stand.request([*stand.tokens(3, 32), 7], "split", "b")
    asked = ask(stand, "sglang", "c")
    for req, reason in ((session, "request_kind"), (short, "host_span"), (asked, "policy")):
        adder = stand.adder(chunk=1024)
        stand.add(adder, req)
        assert adder.can_run_list == [req], reason
        assert report_of(req) == {"policy": "sglang", "way": "sglang", "reason": reason}
        stand.forward(adder)
        stand.finish(req)
    stand.check_at_rest()


def test_a_request_without_a_prefix_on_the_host_gets_no_report(stand):
    req = stand.serve(stand.tokens(5, 300), "split", "r")
    assert req.customized_info is None
    stand.check_at_rest()


def test_without_our_storage_backend_all_is_sglangs(stand):
    stand.cache.chosen = None
    req = stand.serve([*stand.tokens(1, PREFIX), 7], "split", "r")
    assert req.customized_info is None
    assert req.host_loaded_length == PREFIX
    stand.check_at_rest()


def test_another_cache_is_left_alone():
    from cacheflow_sgl.engine import admission

    adder = SimpleNamespace(tree_cache=object())
    calls = []
    assert admission.add_one_req(lambda *a: calls.append(a), adder, "req", True, 64) is None
    assert admission.add_chunked_req(lambda *a: calls.append(a), adder, "req") is None
    assert calls == [(adder, "req", True, 64), (adder, "req")]


def test_a_recompute_reports_all_of_the_prefix(stand):
    req = stand.serve([*stand.tokens(1, PREFIX), 7], "recompute", "r")
    report = report_of(req)
    assert (report["outcome"], report["computed_tokens"]) == ("recomputed", PREFIX)
    assert req.host_loaded_length == 0
    stand.check_at_rest()


def test_a_restore_is_aborted_or_retracted_at_any_step(stand):
    prefix = stand.tokens(1, PREFIX)
    for steps in range(1, 5):
        for ends in (stand.abort, stand.retract):
            stand.evict_device()
            assert stand.matched(prefix)[1] > 0
            req = ask(stand)
            stand.waiting.append(req)
            for _ in range(steps):
                stand.step()
                stand.loads.begin(16)
            assert stand.chunked is req
            ends(req)
            stand.waiting.clear()
            while stand.loads.finish():
                pass
            stand.check()
            assert stand.cache.host_pins == 0
    stand.check_at_rest()


def test_loads_of_the_real_lane_end_before_their_slots_are_free(make_stand):
    """An abort while the thread is inside a transfer."""
    stand = make_stand(page=16, chunk=CHUNK)
    stand.put_on_host(stand.tokens(1, PREFIX))
    stand.transfers.hold()
    req = ask(stand)
    stand.waiting.append(req)
    stand.step()
    stand.transfers.wait_until_held()
    free = stand.allocator.available_size()
    aborting = threading.Thread(target=stand.abort, args=(req,), daemon=True)
    aborting.start()
    aborting.join(0.05)
    assert aborting.is_alive()
    assert stand.allocator.available_size() <= free + CHUNK, "private slots were freed"
    stand.transfers.release()
    aborting.join(10)
    stand.check_at_rest()
