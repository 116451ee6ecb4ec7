"""Any order of arrivals, steps, loads, failures, evictions and ends keeps every slot owned once.

The loads begin and end as steps of their own, so a run is repeatable. After each step `Stand.check`
compares owners with the allocator; every chunk compares its row's KV with what it should be.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytestmark = pytest.mark.engine

PREFIX = 256
CHUNK = 64
POLICIES = ("split", "load", "recompute", "cake", "cacheflow", "sglang")
ARRIVALS = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["split", "load", *POLICIES]),
    st.sampled_from([PREFIX, PREFIX, 192, 64]),
    st.sampled_from([1, 20, 100]),
    st.booleans(),
)
"""Which prefix, by which policy, how much of it, tokens of its own, and whether it was evicted."""
LOADS = st.lists(st.sampled_from(["lands", "lands", "fails"]), max_size=2)
MIXED = st.sampled_from([0, 0, 0, 5, 40, 60])
"""Tokens of a step that running requests take."""


class Restores(RuleBasedStateMachine):
    """One scheduler, three prefixes, little memory."""

    make_stand: Any

    @initialize(page=st.sampled_from([1, 16, 32]), slots=st.sampled_from([448, 512, 1024]))
    def begin(self, page, slots):
        self.stand = self.make_stand(page=page, chunk=CHUNK, slots=slots, host_slots=2048)
        self.loads = self.stand.step_loads()
        self.count = 0
        for which in range(3):
            self.stand.put_on_host(self.prefix(which), nodes=2)

    def prefix(self, which):
        """Prefixes 0 and 1 share their first half."""
        shared = self.stand.tokens(100, PREFIX // 2)
        return (
            [*shared, *self.stand.tokens(which, PREFIX // 2)]
            if which < 2
            else (self.stand.tokens(which, PREFIX))
        )

    def room(self, tokens):
        free = self.stand.allocator.available_size() + self.stand.cache.evictable_size()
        return free >= tokens

    @rule(which=st.integers(0, 2), part=st.sampled_from([64, 128, PREFIX]))
    def others_bring_it_back(self, which, part):
        if self.room(part):
            self.stand.put_on_device(self.prefix(which)[:part])

    def arrives(self, which, policy, part, suffix, evicted):
        """Mostly to find its prefix on the host."""
        if evicted:
            self.stand.evict_device()
        self.count += 1
        tokens = [*self.prefix(which)[:part], *self.stand.tokens(self.count + 10, suffix)]
        self.stand.waiting.append(self.stand.request(tokens, policy, f"r{self.count}"))

    def step(self, mixed, loads):
        self.stand.step(mixed=mixed)
        self.stand.check()
        for end in loads:
            self.loads.begin()
            self.stand.transfers.fail_next = end == "fails"
            self.loads.finish()
        self.stand.transfers.fail_next = 0

    @rule(arrival=ARRIVALS, mixed=MIXED, loads=LOADS)
    def one_more_and_a_step(self, arrival, mixed, loads):
        if len(self.stand.waiting) < 4:
            self.arrives(*arrival)
        self.step(mixed, loads)

    @rule(first=ARRIVALS, second=ARRIVALS, mixed=MIXED, loads=LOADS)
    def two_at_once_and_steps(self, first, second, mixed, loads):
        if not self.stand.waiting:
            self.arrives(*first)
            self.arrives(*second)
        self.step(mixed, loads)
        self.step(mixed, loads)

    @rule(mixed=MIXED, loads=LOADS)
    def steps(self, mixed, loads):
        for _ in range(3):
            self.step(mixed, loads)

    @rule(tokens=st.sampled_from([None, 32, 64, 128]))
    def load_begins(self, tokens):
        self.loads.begin(tokens)

    @rule()
    def load_ends(self):
        self.loads.finish()

    @rule()
    def load_fails(self):
        self.stand.transfers.fail_next = 1
        self.loads.finish()
        self.stand.transfers.fail_next = 0

    @rule()
    def all_is_loaded(self):
        self.loads.run()

    @rule(data=st.data())
    def is_late(self, data):
        waiting = [r for r in self.stand.cache.restores.values() if not r.admitted]
        if waiting:
            data.draw(st.sampled_from(waiting)).late = True

    @precondition(lambda self: self.stand.prefilled)
    @rule(data=st.data())
    def finishes(self, data):
        self.stand.finish(data.draw(st.sampled_from(self.stand.prefilled)))

    @rule(data=st.data())
    def is_aborted(self, data):
        stand = self.stand
        alive = [*stand.waiting, *stand.prefilled, *([stand.chunked] if stand.chunked else [])]
        if alive:
            stand.abort(data.draw(st.sampled_from(alive)))

    @precondition(lambda self: self.stand.chunked or self.stand.prefilled)
    @rule(data=st.data())
    def is_retracted(self, data):
        stand = self.stand
        stand.retract(
            data.draw(st.sampled_from([r for r in [stand.chunked, *stand.prefilled] if r]))
        )

    @rule(tokens=st.sampled_from([32, 128]))
    def host_is_evicted(self, tokens):
        self.stand.cache.evict_host(tokens)

    @rule(tokens=st.sampled_from([64, 256, 2048]))
    def memory_is_short(self, tokens):
        """A running batch asks for what it may not get."""
        self.stand.allocator.evict_to_free_tokens(self.stand.cache, tokens)

    @invariant()
    def every_slot_has_one_owner(self):
        if hasattr(self, "stand"):
            self.stand.check()

    def teardown(self):
        """What is left can be served, and then nothing is held."""
        if not hasattr(self, "stand"):
            return
        stand = self.stand
        for _ in range(300):
            if not (stand.waiting or stand.chunked or stand.prefilled):
                break
            stand.step()
            stand.check()
            for req in list(stand.prefilled):
                stand.finish(req)
            self.loads.run()
        stand.check_at_rest()
        stand.close()


@pytest.fixture
def machine(make_stand):
    class Machine(Restores):
        pass

    from tests.engine.restore_cache import Stand

    Machine.make_stand = staticmethod(Stand)
    return Machine


CHECKS = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large)


def test_restores_in_any_order(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS
        ),
    )


@pytest.mark.full
def test_restores_in_any_order_for_longer(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=600, stateful_step_count=60, deadline=None, suppress_health_check=CHECKS
        ),
    )
