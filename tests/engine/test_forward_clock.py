"""How forwards are timed, and what is learned from a batch of several requests."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.engine.forward_clock import ATTRIBUTE, Forward, ForwardClock, around_forward

ROWS = [("r", Span(64, 128))]


def test_a_forward_that_returns_when_it_is_done_is_timed_by_the_wall_clock():
    clock = ForwardClock(None)
    seen = []

    def forward():
        seen.extend(clock.running())
        assert not clock.take_finished()
        return "result"

    before = time.perf_counter()
    assert clock.run(forward, ROWS) == "result"
    after = time.perf_counter()
    (timed,) = clock.take_finished()
    assert seen == [timed]
    assert timed.rows == ROWS
    assert before <= timed.launched_s == timed.interval.start_s
    assert timed.interval.start_s <= timed.interval.stop_s <= after
    assert not clock.take_finished(), "taken twice"
    assert not clock.running()


def test_a_forward_that_raises_has_ended():
    clock = ForwardClock(None)

    def forward():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        clock.run(forward, ROWS)
    assert clock.take_finished()
    assert not clock.running()


class Device:
    """Events of a stream that runs when the test says so."""

    def __init__(self):
        self.queue = []
        self.done = 0

    def event(self):
        device = self

        class Event:
            def record(self):
                self.at = len(device.queue)
                device.queue.append("event")

            def query(self):
                return self.at < device.done

            def elapsed_time(self, other):
                return 250.0 * (other.at - self.at)

        return Event()


def test_a_forward_that_is_only_queued_is_timed_by_events():
    device = Device()
    clock = ForwardClock(device.event)
    for _ in range(2):
        clock.run(lambda: device.queue.append("forward"), ROWS)
    assert device.queue == ["event", "forward", "event"] * 2
    first, second = clock.running()
    assert not clock.take_finished()
    device.done = 3
    assert clock.take_finished() == [first]
    assert clock.running() == [second]
    assert first.interval.seconds == pytest.approx(0.5)
    assert first.interval.stop_s <= time.perf_counter()
    device.done = 6
    assert clock.take_finished() == [second]
    assert not clock.running()


def test_forwards_are_told_in_order():
    """The device runs them in order: one that seems to be done before an earlier one waits."""
    ready = []

    class Event:
        def record(self):
            pass

        def query(self):
            return self in ready

        def elapsed_time(self, other):
            return 1.0

    events = []

    def make():
        events.append(Event())
        return events[-1]

    clock = ForwardClock(make)
    clock.run(lambda: None, [("first", Span(0, 64))])
    clock.run(lambda: None, [("second", Span(0, 64))])
    ready.append(events[3])
    assert not clock.take_finished()
    ready.append(events[1])
    assert [forward.rows[0][0] for forward in clock.take_finished()] == ["first", "second"]


spans = st.builds(
    lambda start, tokens: Span(start, start + tokens), st.integers(0, 10**5), st.integers(1, 10**4)
)


@example([Span(0, 6185), Span(6186, 12371)], 0.0, 0.0, 0.9726151572373412)
@given(st.lists(spans, min_size=1, max_size=8), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_several_requests_cost_what_the_one_equivalent_does(spans, base, per_row, per_read):
    """Rows read the context before them: the sum over requests is kept, to a half token a row."""
    forward = Forward([(str(index), span) for index, span in enumerate(spans)], 0.0)
    tokens = forward.tokens
    assert tokens == sum(span.tokens for span in spans)
    reads = sum(span.tokens * (span.start + span.tokens / 2) for span in spans)
    if reads < tokens * tokens / 2:
        assert forward.offset == 0, "less than one request can cost"
        return
    real = base + per_row * tokens + per_read * reads
    told = base + per_row * tokens + per_read * tokens * (forward.offset + tokens / 2)
    # Half a token exactly is rounded either way: a little more than half is allowed.
    assert told == pytest.approx(real, rel=1e-9, abs=per_read * tokens * 0.5001 + 1e-9)


@given(spans)
def test_one_request_is_told_as_it_is(span):
    forward = Forward([("r", span)], 0.0)
    assert (forward.offset, forward.tokens) == (span.start, span.tokens)


# -- the hook


def batch(extend=True, **fields):
    mode = SimpleNamespace(is_extend=lambda: extend)
    reqs = [SimpleNamespace(rid=rid) for rid in "ab"]
    whole = {"prefix_lens": [64, 0], "extend_lens": [32, 16], "reqs": reqs} | fields
    return SimpleNamespace(forward_mode=mode, **whole)


def run_hook(worker, batch):
    calls = []

    def original(*args, **kw):
        calls.append((args, kw))
        return "result"

    assert around_forward(original, worker, batch, 1, keyword=2) == "result"
    assert calls == [((worker, batch, 1), {"keyword": 2})]


def test_extend_forwards_are_timed():
    clock = ForwardClock(None)
    run_hook(SimpleNamespace(**{ATTRIBUTE: clock}), batch())
    (timed,) = clock.take_finished()
    assert timed.rows == [("a", Span(64, 96)), ("b", Span(0, 16))]


def test_requests_without_rows_are_left_out():
    clock = ForwardClock(None)
    run_hook(SimpleNamespace(**{ATTRIBUTE: clock}), batch(extend_lens=[0, 16]))
    assert [rid for rid, _ in clock.take_finished()[0].rows] == ["b"]


@pytest.mark.parametrize("given", [None, batch(extend=False), batch(extend_lens=[0, 0])])
def test_other_forwards_are_not(given):
    clock = ForwardClock(None)
    run_hook(SimpleNamespace(**{ATTRIBUTE: clock}), given)
    assert not clock.take_finished()


def test_a_worker_without_a_clock_of_ours():
    run_hook(SimpleNamespace(), batch())
