"""Batch policies: who is next, against plain rules over all requests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.batch import PATIENCE, Batch, BatchPolicyName, Candidate, batch


def candidate(order: int, **facts: Any) -> Candidate:
    """A request that can do everything, of 1 s either way."""
    plain: dict[str, Any] = {
        "rid": str(order),
        "order": order,
        "arrived_s": 0.0,
        "compute_s": 1.0,
        "load_s": 1.0,
        "suffix_s": 0.1,
        "can_compute": True,
        "tiers": (0,),
    }
    return Candidate(**plain | facts)


def filled(name: str, *candidates: Candidate) -> Batch:
    waiting = batch(name)
    for each in candidates:
        waiting.add(each)
    return waiting


def computes(waiting: Batch) -> str | None:
    chosen = waiting.next_compute(0.0)
    return chosen and chosen.rid


def loads(waiting: Batch, tier: int = 0) -> str | None:
    chosen = waiting.next_load(tier)
    return chosen and chosen.rid


everyone = pytest.mark.parametrize("name", BatchPolicyName)


@everyone
def test_an_empty_batch_names_nobody(name: str) -> None:
    waiting = batch(name)
    assert computes(waiting) is None
    assert loads(waiting) is None
    assert len(waiting) == 0


@everyone
def test_nobody_is_named_who_cannot(name: str) -> None:
    waiting = filled(name, candidate(0, can_compute=False, tiers=(), load_s=0.0))
    assert computes(waiting) is None
    assert loads(waiting) is None


@everyone
def test_links_are_separate(name: str) -> None:
    here, there = candidate(0, tiers=(0,)), candidate(1, tiers=(1,))
    waiting = filled(name, here, there)
    expected = (None, None) if name == "recompute" else ("0", "1")
    assert (loads(waiting, 0), loads(waiting, 1)) == expected
    here.tiers = (1,)
    waiting.update(here)
    assert loads(waiting, 0) is None
    waiting.remove("1")
    assert loads(waiting, 1) == (None if name == "recompute" else "0")


@everyone
def test_a_request_in_two_tiers_is_named_to_both_links(name: str) -> None:
    both = candidate(0, tiers=(1, 0))
    waiting = filled(name, both)
    named = None if name == "recompute" else "0"
    assert (loads(waiting, 0), loads(waiting, 1)) == (named, named)
    both.tiers = (0,)
    waiting.update(both)
    assert (loads(waiting, 0), loads(waiting, 1)) == (named, None)
    waiting.remove("0")
    assert loads(waiting, 0) is loads(waiting, 1) is None


@everyone
def test_a_removed_request_is_never_named(name: str) -> None:
    waiting = filled(name, candidate(0), candidate(1, load_s=0.0, tiers=()))
    computes(waiting)
    for rid in ("0", "1"):
        waiting.remove(rid)
    assert (computes(waiting), loads(waiting), len(waiting)) == (None, None, 0)
    waiting.add(candidate(0, load_s=0.0))
    assert computes(waiting) == "0"


@everyone
def test_misuse_is_told(name: str) -> None:
    waiting = filled(name, candidate(0))
    with pytest.raises(ValueError, match="request 0 is in the batch already"):
        waiting.add(candidate(0))
    with pytest.raises(KeyError, match="request 1 is not in the batch"):
        waiting.update(candidate(1))
    with pytest.raises(KeyError):
        waiting.remove("1")


@pytest.mark.parametrize("name", ["recompute", "cake", "fifo", "longest", "cacheflow"])
def test_who_has_begun_is_finished_first(name: str) -> None:
    long = candidate(1, compute_s=9.0, load_s=9.0)
    waiting = filled(name, long)
    assert computes(waiting) == "1"
    waiting.add(candidate(0))
    assert computes(waiting) == "1"
    long.can_compute = False
    waiting.update(long)
    assert computes(waiting) == "0"


def test_recompute_loads_nothing() -> None:
    waiting = filled("recompute", candidate(1), candidate(0))
    assert (computes(waiting), loads(waiting)) == ("0", None)


def test_load_computes_what_is_loaded_in_that_order() -> None:
    first, second = candidate(0), candidate(1)
    waiting = filled("load", first, second)
    assert (computes(waiting), loads(waiting)) == (None, "0")
    for done in (second, first):
        done.load_s, done.compute_s, done.tiers = 0.0, 0.0, ()
        waiting.update(done)
    assert computes(waiting) == "1"
    waiting.remove("1")
    assert computes(waiting) == "0"


def test_cake_goes_round() -> None:
    waiting = filled("cake", *(candidate(order) for order in range(3)))
    assert [loads(waiting) for _ in range(4)] == ["0", "1", "2", "0"]
    waiting.add(candidate(3))
    assert [loads(waiting) for _ in range(4)] == ["3", "1", "2", "0"]
    assert computes(waiting) == "0"


def test_cake_goes_round_on_each_link_by_itself() -> None:
    waiting = filled("cake", candidate(0, tiers=(0, 1)), candidate(1, tiers=(1,)))
    assert [loads(waiting) for _ in range(3)] == ["0", "0", "0"]
    assert [loads(waiting, 1) for _ in range(3)] == ["0", "1", "0"]


def test_longest_loads_for_the_most_work_left() -> None:
    short, long = candidate(0), candidate(1, compute_s=3.0)
    waiting = filled("longest", short, long)
    assert (computes(waiting), loads(waiting)) == ("0", "1")
    long.compute_s = 0.5
    waiting.update(long)
    assert loads(waiting) == "0"


def test_cacheflow_serves_the_soonest_done_on_both_lanes() -> None:
    waiting = filled("cacheflow", candidate(0, load_s=5.0), candidate(1), candidate(2))
    assert (computes(waiting), loads(waiting)) == ("1", "1")
    waiting.update(candidate(1, tiers=()))
    assert loads(waiting) == "2"


def test_cacheflow_makes_nobody_wait_for_ever() -> None:
    long = candidate(0, suffix_s=2.0)
    patient_s = PATIENCE * (long.joint_s - candidate(1).joint_s)
    waiting = filled("cacheflow", long, candidate(1, arrived_s=patient_s - 0.01))
    assert loads(waiting) == "1"
    waiting = filled("cacheflow", long, candidate(1, arrived_s=patient_s + 0.01))
    assert loads(waiting) == "0"


def test_cacheflow_keeps_the_lane_idle_for_a_short_wait() -> None:
    head = candidate(0, suffix_s=0.0, can_compute=False, ready_s=0.2)
    other = candidate(1, step_s=0.3)
    waiting = filled("cacheflow", head, other)
    assert computes(waiting) is None
    head.ready_s = 0.4
    waiting.update(head)
    assert computes(waiting) == "1"
    # What fills the wait has not begun.
    head.can_compute, head.ready_s = True, float("inf")
    waiting.update(head)
    assert computes(waiting) == "0"


def test_cacheflow_does_not_wait_for_who_comes_later() -> None:
    later = candidate(0, can_compute=False, ready_s=0.0, compute_s=9.0, load_s=9.0)
    waiting = filled("cacheflow", later, candidate(1, step_s=1.0))
    assert computes(waiting) == "1"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="soonest"):
        batch("soonest")


facts = st.fixed_dictionaries(
    {
        "compute_s": st.integers(0, 4).map(float),
        "load_s": st.integers(0, 4).map(float),
        "can_compute": st.booleans(),
        "tiers": st.sampled_from([(), (0,), (1,), (0, 1), (1, 0)]),
        "ready_s": st.sampled_from([0.5, 1.5, float("inf")]),
        "step_s": st.sampled_from([0.0, 1.0, 2.0]),
        "step_load_s": st.sampled_from([0.0, 1.0, 2.0]),
    }
)
steps = st.lists(
    st.tuples(st.sampled_from(["put", "put", "remove", "look"]), st.integers(0, 5), facts),
    max_size=60,
)
rules: dict[str, Callable[[Candidate, float], Any]] = {
    "fifo": lambda each, joint_s: each.order,
    "longest": lambda each, joint_s: (-each.compute_s, each.order),
    "cacheflow": lambda each, joint_s: (PATIENCE * joint_s, each.order),
}


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(list(rules)), steps)
def test_heaps_agree_with_a_look_at_all(  # noqa: C901
    name: str, todo: list[tuple[str, int, dict]]
) -> None:
    waiting, known, joint_s = batch(name), dict[int, Candidate](), dict[int, float]()
    begun: list[int] = []
    rule = rules[name]
    brought: dict[int, float] = {}
    came: dict[str, list[float]] = {"suffix_s": [], "load_s": []}

    def more(what: str) -> float:
        """Requests that will come while the work that waits is done, by those that have gone."""
        left_s = sum(getattr(each, what) for each in known.values())
        return len(came[what]) / 60 * left_s / max(1 - sum(came[what]) / 60, 0.01)

    def crowds_out(each: Candidate) -> bool:
        others = (
            len(known) - 1 if any(e.can_compute and not e.compute_s for e in known.values()) else 0
        )
        to_load = sum(e.load_s > 0 for e in known.values())
        gain = (to_load + more("load_s")) * each.step_load_s
        return each.step_load_s > 0 and (others + more("suffix_s")) * each.step_s > gain

    def place(each: Candidate) -> Any:
        own = rules["cacheflow" if name == "cacheflow" else "fifo"]
        turn = begun.index(each.order) if each.order in begun else len(begun)
        return turn, own(each, joint_s[each.order])

    def load_place(each: Candidate) -> Any:
        return place(each) if name == "cacheflow" else rule(each, 0.0)

    for action, order, update in todo:
        if action == "put":
            known[order] = candidate(order, **update)
            if order not in joint_s:
                joint_s[order] = known[order].joint_s
                brought[order] = known[order].load_s
                waiting.add(known[order])
            else:
                waiting.update(known[order])
        elif action == "remove" and order in known:
            waiting.remove(str(order))
            came["suffix_s"].append(known[order].suffix_s)
            came["load_s"] += [brought[order]] if brought[order] else []
            del known[order], joint_s[order]
            begun = [each for each in begun if each != order]
        elif action == "look":
            able = sorted((each for each in known.values() if each.can_compute), key=place)
            expected = able[0] if able else None
            if name == "cacheflow" and expected:
                near = [e for e in known.values() if e.can_compute or e.ready_s < float("inf")]
                head = min(near, key=place)
                if crowds_out(expected):
                    expected = next((each for each in able if not each.compute_s), None)
                    begins = expected is not None
                else:
                    if head is not expected and head.ready_s < expected.step_s:
                        expected = None
                    begins = head is expected
            else:
                begins = expected is not None
            assert waiting.next_compute(0.0) is expected
            if begins and expected and expected.order not in begun:
                begun.append(expected.order)
        for tier in (0, 1):
            able = [each for each in known.values() if tier in each.tiers]
            assert waiting.next_load(tier) is min(able, key=load_place, default=None)


def test_a_step_that_others_would_wait_for_is_left_to_the_link() -> None:
    prefix = {"compute_s": 4.0, "load_s": 8.0, "suffix_s": 0.0, "step_load_s": 3.0}
    ready = [candidate(order, compute_s=0.0, load_s=0.0, suffix_s=5.0) for order in (1, 2)]
    waiting = filled("cacheflow", candidate(0, **prefix, step_s=1.0), *ready)
    assert waiting.next_compute(0.0).order == 0, "two wait 1 s longer, 3 s are saved"
    waiting.update(candidate(0, **prefix, step_s=2.0))
    assert waiting.next_compute(0.0).order == 1
    for other in ready:
        waiting.remove(other.rid)
    assert waiting.next_compute(0.0).order == 0, "nobody is ready, so nobody waits"


def test_a_busy_lane_computes_no_prefix_that_can_be_loaded() -> None:
    facts = {"arrived_s": 50.0, "compute_s": 1.0, "load_s": 2.0, "suffix_s": 0.5, "step_s": 1.0}
    prefix = candidate(99, **facts, step_load_s=1.0)
    waiting = filled("cacheflow", prefix)
    assert waiting.next_compute(50.0) is prefix
    waiting.note_decode(50.0, 55.0)
    for order in range(8):
        other = candidate(order, arrived_s=50.0, compute_s=0.0, load_s=0.0, suffix_s=0.5)
        waiting.add(other)
        waiting.remove(other.rid)
    assert waiting.next_compute(50.0) is None, "more will come than the lane has time for"
    assert waiting.next_compute(50.0 + 600.0) is prefix, "that was long ago"
    hole = candidate(99, **facts)
    waiting.update(hole)
    assert waiting.next_compute(50.0) is hole, "nothing of it can be loaded"


@pytest.mark.bench
@everyone
def test_decision_times(name: str) -> None:
    waiting = filled(name, *(candidate(order, compute_s=1.0 + order) for order in range(256)))
    times = []
    for _ in range(5000):
        start = time.perf_counter()
        for chosen in (waiting.next_compute(0.0), waiting.next_load(0)):
            if chosen is not None:
                chosen.compute_s -= 1e-3
                waiting.update(chosen)
        times.append((time.perf_counter() - start) * 1e6 / 2)
    print(f"\n{name}: {statistics.median(times):.1f} us a decision with its update, 256 requests")
