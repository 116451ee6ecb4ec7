"""The I/O lane: what it loads in which order, and how it takes failures and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.plans import Plan, Way
from cacheflow_sgl.core.policies import Policy

PATIENCE_S = 20.0
PAGE = 16
SPAN = Span(64, 320)


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def restore_of(rid: str = "r", span: Span = SPAN):
    import torch

    from cacheflow_sgl.engine.restores import HostSpan, Restore

    host = HostSpan(span, torch.arange(span.tokens), ["node"], "node")
    plan = Plan(Way.SPLIT, "as told", span.stop, {})
    req = SimpleNamespace(rid=rid)
    return Restore.planned(req, host, Policy.SPLIT, plan, page=PAGE, now_s=0.0)


@dataclass
class Lane:
    """A loader whose transfers, sizes and observations the test sees and spoils."""

    size: int = 64
    loads: list[tuple[str, Span]] = field(default_factory=list)
    observed: list[tuple[int, float]] = field(default_factory=list)
    spoil: Callable[[str, str], None] = lambda rid, what: None
    """Called with a request and "size", "transfer" or "observe"; may raise."""
    open: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        from cacheflow_sgl.engine.loader import Loader

        self.open.set()
        self.loader = Loader(self.transfer, self.claim_size, self.observe)

    def transfer(self, restore, claim):
        self.rid = restore.req.rid
        self.begun.set()
        assert self.open.wait(PATIENCE_S)
        self.spoil(self.rid, "transfer")
        self.loads.append((self.rid, claim))
        return claim.tokens * 10

    def claim_size(self, restore):
        self.spoil(restore.req.rid, "size")
        return self.size

    def observe(self, nbytes, seconds):
        self.spoil(self.rid, "observe")
        self.observed.append((nbytes, seconds))


@pytest.fixture
def lane():
    made = Lane()
    yield made
    made.open.set()
    made.loader.close()


def done(restore) -> bool:
    pointers = restore.pointers
    return not pointers.loads_in_flight and (not pointers.gap or pointers.loading_stopped)


def test_all_of_a_span_is_loaded_once_from_the_tail(lane):
    restore = restore_of()
    assert lane.loader._thread is None, "a thread before there was anything to load"
    lane.loader.submit(restore)
    until(lambda: done(restore))
    claims = [claim for _, claim in lane.loads]
    assert claims == [Span(at, at + 64) for at in (256, 192, 128, 64)]
    assert [span for _, span in restore.io_lane.busy] == claims
    assert restore.loaded_bytes == 2560
    assert restore.pointers.loaded_tokens == SPAN.tokens
    assert [nbytes for nbytes, _ in lane.observed] == [640] * 4
    assert all(seconds > 0 for _, seconds in lane.observed)
    busy = [interval.seconds for interval, _ in restore.io_lane.busy]
    assert busy == [seconds for _, seconds in lane.observed]


def test_restores_are_served_in_the_order_they_began(lane):
    lane.open.clear()
    restores = [restore_of(rid) for rid in "abc"]
    for restore in restores:
        lane.loader.submit(restore)
    lane.open.set()
    until(lambda: all(map(done, restores)))
    assert [rid for rid, _ in lane.loads] == [rid for rid in "abc" for _ in range(4)]


def test_room_that_a_returned_claim_makes_is_found_and_served_first(lane):
    first, second = restore_of("first"), restore_of("second", Span(0, 4096))
    first.pointers.claim_compute(256)
    looked = []
    lane.spoil = lambda rid, what: looked.append(what)
    lane.loader.submit(first)
    until(lambda: bool(looked))
    with lane.loader._changed:  # free once the lane waits
        assert not lane.loads
    first.pointers.return_compute(192)
    until(lambda: done(first))
    assert [claim for _, claim in lane.loads] == [Span(256, 320), Span(192, 256)]

    third = restore_of("third")
    third.pointers.claim_compute(256)
    lane.open.clear()
    lane.begun.clear()
    lane.loader.submit(third)
    lane.loader.submit(second)
    assert lane.begun.wait(PATIENCE_S)
    third.pointers.return_compute(256)
    lane.open.set()
    until(lambda: done(second))
    assert [rid for rid, _ in lane.loads[2:4]] == ["second", "third"]


def test_a_failed_load_is_left_to_compute_and_the_rest_goes_on(lane, caplog):
    failures = iter([OSError("bad link")])

    def spoil(rid, what):
        if what == "transfer" and (error := next(failures, None)):
            raise error

    lane.spoil = spoil
    restore = restore_of()
    lane.loader.submit(restore)
    until(lambda: done(restore))
    assert restore.failed_loads == 1
    assert restore.pointers.failed_tokens == 64
    assert restore.pointers.loaded_tokens == SPAN.tokens - 64
    assert [span for _, span in restore.io_lane.busy] == [claim for _, claim in lane.loads]
    (line,) = caplog.messages
    assert "tokens 256-320 of r" in line
    assert "OSError: bad link" in line
    assert restore.loading is None


def always(what_fails: str, whose: str = "bad"):
    def spoil(rid, what):
        if (rid, what) == (whose, what_fails):
            raise RuntimeError(what)

    return spoil


def test_the_third_failure_ends_the_loads_of_that_restore_alone(lane):
    lane.spoil = always("transfer")
    bad, good = restore_of("bad"), restore_of("good")
    lane.loader.submit(bad)
    lane.loader.submit(good)
    until(lambda: done(good))
    assert bad.failed_loads == 3
    assert bad.pointers.loading_stopped
    assert bad.pointers.failed_tokens == 3 * 64
    assert good.pointers.loaded_tokens == SPAN.tokens


@pytest.mark.parametrize("what", ["size", "transfer", "observe"])
def test_whatever_one_restore_does_to_the_lane_others_are_served(lane, what):
    lane.spoil = always(what)
    bad, good = restore_of("bad"), restore_of("good")
    lane.loader.submit(bad)
    lane.loader.submit(good)
    until(lambda: done(good))
    assert good.pointers.loaded_tokens == SPAN.tokens
    assert bad.pointers.loaded_tokens == 0
    lane.loader.withdraw(bad)
    assert not bad.pointers.loads_in_flight


def test_no_load_begins_before_the_fence_has_passed_and_others_go_on(lane):
    passed = threading.Event()
    fenced, good = restore_of("fenced"), restore_of("good")
    fenced.fence = (SimpleNamespace(query=lambda: True), SimpleNamespace(query=passed.is_set))
    lane.loader.submit(fenced)
    lane.loader.submit(good)
    until(lambda: done(good))
    assert {rid for rid, _ in lane.loads} == {"good"}
    assert not fenced.pointers.loads_in_flight
    passed.set()
    until(lambda: done(fenced))
    assert fenced.fence == ()


def test_a_restore_behind_its_fence_is_withdrawn_at_once(lane):
    restore = restore_of()
    restore.fence = (SimpleNamespace(query=lambda: False),)
    lane.loader.submit(restore)
    lane.loader.withdraw(restore)
    assert not lane.loads


def test_a_fence_that_breaks_leaves_its_restore_to_compute(lane):
    def broken():
        raise RuntimeError("device lost")

    restore, good = restore_of("bad"), restore_of("good")
    restore.fence = (SimpleNamespace(query=broken),)
    lane.loader.submit(restore)
    lane.loader.submit(good)
    until(lambda: done(good))
    assert restore.pointers.loading_stopped
    assert {rid for rid, _ in lane.loads} == {"good"}, "it wrote without having passed the fence"


def test_a_probe_is_one_load(lane):
    restore = restore_of()
    restore.probe = True
    lane.loader.submit(restore)
    until(lambda: done(restore))
    assert lane.loads == [("r", Span(256, 320))]


def test_what_is_under_way_can_be_seen(lane):
    lane.open.clear()
    restore = restore_of()
    lane.loader.submit(restore)
    assert lane.begun.wait(PATIENCE_S)
    claim, began_s = restore.loading
    assert claim == Span(256, 320)
    assert began_s <= time.perf_counter()
    lane.open.set()
    until(lambda: done(restore))
    until(lambda: restore.loading is None)


def in_the_background(call, *args):
    thread = threading.Thread(target=call, args=args, daemon=True)
    thread.start()
    return thread


def test_withdrawing_waits_for_the_load_under_way_and_ends_the_rest(lane):
    lane.open.clear()
    restore = restore_of()
    lane.loader.submit(restore)
    assert lane.begun.wait(PATIENCE_S)
    withdrawing = in_the_background(lane.loader.withdraw, restore)
    withdrawing.join(0.05)
    assert withdrawing.is_alive(), "it came back while a load could still write"
    lane.open.set()
    withdrawing.join(PATIENCE_S)
    assert not withdrawing.is_alive()
    assert lane.loads == [("r", Span(256, 320))]
    assert restore not in lane.loader._restores


def test_withdrawing_while_another_ones_load_is_under_way_does_not_wait(lane):
    lane.open.clear()
    busy, idle = restore_of("busy"), restore_of("idle")
    lane.loader.submit(busy)
    lane.loader.submit(idle)
    assert lane.begun.wait(PATIENCE_S)
    withdrawing = in_the_background(lane.loader.withdraw, idle)
    withdrawing.join(PATIENCE_S)
    assert not withdrawing.is_alive()
    lane.open.set()
    until(lambda: done(busy))
    assert {rid for rid, _ in lane.loads} == {"busy"}


def test_withdrawing_what_was_never_submitted(lane):
    restore = restore_of()
    lane.loader.withdraw(restore)
    assert restore.pointers.loading_stopped


def test_closing_ends_the_load_under_way_first(lane):
    lane.open.clear()
    restore = restore_of()
    lane.loader.submit(restore)
    assert lane.begun.wait(PATIENCE_S)
    closing = in_the_background(lane.loader.close)
    closing.join(0.05)
    assert closing.is_alive()
    lane.open.set()
    closing.join(PATIENCE_S)
    assert not lane.loader._thread.is_alive()
    assert lane.loads == [("r", Span(256, 320))]
    withdrawing = in_the_background(lane.loader.withdraw, restore)
    withdrawing.join(PATIENCE_S)
    assert not withdrawing.is_alive()


def test_closing_wakes_an_idle_lane(lane):
    restore = restore_of()
    lane.loader.submit(restore)
    until(lambda: done(restore))
    lane.loader.withdraw(restore)
    closing = in_the_background(lane.loader.close)
    closing.join(PATIENCE_S)
    assert not lane.loader._thread.is_alive()


def test_waiting_ends_with_the_load_that_brings_it_about(lane):
    lane.open.clear()
    restore = restore_of()
    lane.loader.submit(restore)
    assert lane.begun.wait(PATIENCE_S)
    assert not lane.loader.wait_until(lambda: restore.loads_ended, 0.01)
    waiting = in_the_background(lane.loader.wait_until, lambda: restore.loads_ended, 600.0)
    waiting.join(0.05)
    assert waiting.is_alive()
    lane.open.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_a_fence_is_an_event_on_each_stream():
    from cacheflow_sgl.engine.loader import record_fence

    class Event:
        def record(self, stream):
            self.stream = stream

    fence = record_fence(SimpleNamespace(Event=Event), "schedule", "forward")
    assert [event.stream for event in fence] == ["schedule", "forward"]
