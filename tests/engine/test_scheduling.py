"""What a scheduler step does around a restore that waits, and what SGLang is told of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cacheflow_sgl.core.report import Outcome

pytestmark = pytest.mark.engine

PREFIX = 512


@pytest.fixture
def scheduling():
    from cacheflow_sgl.engine import scheduling

    return scheduling


@pytest.fixture
def stand(make_stand, monkeypatch):
    """A stand with a restore of request `r`; waits for loads are counted, not made."""
    made = make_stand()
    made.put_on_host(made.tokens(1, PREFIX))
    made.step_loads()
    made.restore = made.loads_while_queued(made.tokens(1, PREFIX))
    made.waits = []
    monkeypatch.setattr(made.cache, "wait_for_load", made.waits.append)
    yield made
    if made.cache.restores:
        made.cache.end(made.restore, Outcome.ABORTED)
    made.check_at_rest()


class Scheduler:
    """As much of SGLang's as the hook sees; counts the steps that reach the original."""

    def __init__(self, stand, *, running=0, batch=None, last_batch=None):
        self.tree_cache = stand.cache
        self.chunked_req = None
        self.last_batch = last_batch
        self.running = SimpleNamespace(reqs=[1] * running, is_empty=lambda: not running)
        self.batch = batch
        self.steps = 0

    def step(self, scheduling, *, by_keyword=True):
        def original(scheduler, delayer, running_batch):
            assert (scheduler, delayer, running_batch) == (self, "delayer", self.running)
            self.steps += 1
            return self.batch, running_batch

        if by_keyword:
            given = {"prefill_delayer_single_pass": "delayer", "running_batch": self.running}

            def named(scheduler, prefill_delayer_single_pass, running_batch):
                return original(scheduler, prefill_delayer_single_pass, running_batch)

            result = scheduling.new_prefill_batch(named, self, **given)
        else:
            result = scheduling.new_prefill_batch(original, self, "delayer", self.running)
        assert result[1] is self.running
        return result[0]


def batch_of(*reqs, chunked):
    return SimpleNamespace(reqs=list(reqs), chunked_req=chunked, contains_last_prefill_chunk=False)


@pytest.mark.parametrize("by_keyword", [True, False])
def test_steps_that_admit_are_passed_on(stand, scheduling, by_keyword):
    chunked = SimpleNamespace(rid="r", inflight_middle_chunks=1)
    batch = batch_of(chunked, chunked=chunked)
    scheduler = Scheduler(stand, batch=batch)
    scheduler.chunked_req = chunked
    assert scheduler.step(scheduling, by_keyword=by_keyword) is batch
    assert batch.chunked_req is chunked
    assert chunked.inflight_middle_chunks == 1
    assert not batch.contains_last_prefill_chunk
    assert not stand.waits


def test_a_parked_request_is_no_part_of_the_batch_of_others(stand, scheduling):
    parked = SimpleNamespace(rid="r", inflight_middle_chunks=1)
    batch = batch_of(SimpleNamespace(rid="other"), chunked=parked)
    scheduler = Scheduler(stand, batch=batch)
    scheduler.chunked_req = parked
    assert scheduler.step(scheduling) is batch
    assert batch.chunked_req is None
    assert parked.inflight_middle_chunks == 0
    assert batch.contains_last_prefill_chunk


def test_a_batch_without_a_chunked_request_stays_as_it_is(stand, scheduling):
    batch = batch_of(SimpleNamespace(rid="other"), chunked=None)
    assert Scheduler(stand, batch=batch).step(scheduling) is batch
    assert not batch.contains_last_prefill_chunk


@pytest.mark.parametrize(
    ("running", "last_batch", "waits"), [(0, None, 1), (1, None, 0), (0, "batch", 0)]
)
def test_only_an_idle_scheduler_waits_for_a_load(stand, scheduling, running, last_batch, waits):
    scheduler = Scheduler(stand, running=running, last_batch=last_batch)
    assert scheduler.step(scheduling) is None
    assert len(stand.waits) == waits
    assert all(0 < wait_s < 1 for wait_s in stand.waits)


@pytest.mark.parametrize("news", [True, False])
def test_a_step_is_taken_again_when_a_restore_can_go_on(stand, scheduling, monkeypatch, news):
    monkeypatch.setattr(stand.cache, "wait_for_load", lambda timeout_s: news)
    scheduler = Scheduler(stand)
    assert scheduler.step(scheduling) is None
    assert scheduler.steps == 1 + news


def test_waiting_ends_when_all_has_landed_and_publishes_it(make_stand):
    stand = make_stand()
    tokens = stand.tokens(1, PREFIX)
    stand.put_on_host(tokens)
    loads = stand.step_loads()
    restore = stand.loads_while_queued(tokens)
    assert not stand.cache.wait_for_load(0.01)
    loads.run()
    assert stand.cache.wait_for_load(10)
    assert not stand.cache.restores
    assert stand.matched(tokens) == (PREFIX, 0)
    assert stand.cache.loaded_while_queued(restore.req) == PREFIX
    stand.check_at_rest()


def test_a_scheduler_whose_restore_has_ended_does_not_wait(stand, scheduling):
    scheduler = Scheduler(stand)

    def original(scheduler, delayer, running):
        stand.cache.end(stand.restore, Outcome.ABORTED)
        return None, running

    scheduling.new_prefill_batch(original, scheduler, "delayer", scheduler.running)
    assert not stand.waits


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_running_requests_get_their_steps_between_two_chunks(stand, scheduling, steps):
    from cacheflow_sgl.engine.options import Options

    stand.cache.chosen = Options(restore_decode_steps=steps)
    chunked = SimpleNamespace(rid="r", inflight_middle_chunks=1)
    scheduler = Scheduler(stand, running=1, batch=batch_of(chunked, chunked=chunked))
    scheduler.chunked_req = chunked
    got = [scheduler.step(scheduling) is not None for _ in range(2 * (steps + 1))]
    assert got == ([False] * steps + [True]) * 2
    assert scheduler.steps == 2


@pytest.mark.parametrize("why", ["nothing runs", "no restore", "no chunked request", "detached"])
def test_no_steps_are_given_away_for_nothing(stand, scheduling, why):
    from cacheflow_sgl.engine.options import Options

    stand.cache.chosen = None if why == "detached" else Options(restore_decode_steps=3)
    scheduler = Scheduler(stand, running=why != "nothing runs")
    if why != "no chunked request":
        rid = "plain" if why == "no restore" else "r"
        scheduler.chunked_req = SimpleNamespace(rid=rid, inflight_middle_chunks=0)
    scheduler.step(scheduling)
    assert scheduler.steps == 1


@pytest.mark.parametrize("whose", ["SGLang's", "ours, at rest"])
def test_without_a_restore_nothing_changes(stand, scheduling, whose):
    stand.cache.end(stand.restore, Outcome.ABORTED)
    chunked = SimpleNamespace(rid="r", inflight_middle_chunks=1)
    batch = batch_of(chunked=chunked)
    scheduler = Scheduler(stand, batch=batch)
    if whose == "SGLang's":
        scheduler.tree_cache = SimpleNamespace()
    assert scheduler.step(scheduling) is batch
    assert batch.chunked_req is chunked
    scheduler.batch = None
    scheduler.step(scheduling)
    assert not stand.waits


def test_private_slots_are_no_leak(stand, scheduling):
    checker = SimpleNamespace(tree_cache=stand.cache)
    assert scheduling.uncached_sizes(lambda checker: (7, 3), checker) == (7 + PREFIX, 3)
    stand.cache.end(stand.restore, Outcome.ABORTED)
    assert scheduling.uncached_sizes(lambda checker: (7, 3), checker) == (7, 3)
    checker.tree_cache = SimpleNamespace()
    assert scheduling.uncached_sizes(lambda checker: (7, 3), checker) == (7, 3)


def test_a_report_is_told_once_a_request(scheduling):
    def level(key):
        return scheduling.is_request_level(lambda streamer, key: key == "sglangs", None, key)

    assert level("cacheflow_restore")
    assert level("sglangs")
    assert not level("other")
