"""What two pointers do, by example; and with threads. (Any interleaving: the state machine.)"""

from __future__ import annotations

import operator
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cacheflow_sgl.core.geometry import Segment, Span, segments_of
from cacheflow_sgl.core.pointers import TwoPointers

PAGE = 64


def pointers(pages: str) -> TwoPointers:
    """A restore of pages drawn as x (present) and - (missing)."""
    span = Span(0, len(pages) * PAGE)
    return TwoPointers(segments_of(span, [page == "x" for page in pages], PAGE), PAGE)


def pages(first: int, stop: int) -> Span:
    return Span(first * PAGE, stop * PAGE)


def load(two: TwoPointers, count: int) -> Span:
    claim = two.claim_load(count * PAGE)
    assert claim is not None
    return claim


def compute(two: TwoPointers, count: int) -> Span:
    claim = two.claim_compute(count * PAGE)
    assert claim is not None
    return claim


def test_compute_goes_up_loads_come_down_and_the_request_jumps_at_the_meeting() -> None:
    two = pointers("x" * 8)
    assert compute(two, 3) == pages(0, 3)
    tail = load(two, 2)
    assert tail == pages(6, 8)
    assert (two.position, two.load_pointer, two.gap) == (3 * PAGE, 6 * PAGE, 3 * PAGE)
    assert compute(two, 99) == pages(3, 6)  # not past the load pointer

    assert two.meeting  # nothing to claim, but the load is on its way
    assert two.claim_compute(PAGE) is two.claim_load(PAGE) is two.jump() is None
    two.landed(tail)
    assert not two.meeting
    assert not two.finished
    assert two.jump() == pages(6, 8)

    assert two.finished
    assert two.position == 8 * PAGE
    assert two.jumps == (pages(6, 8),)
    assert (two.computed_tokens, two.loaded_tokens, two.failed_tokens) == (6 * PAGE, 2 * PAGE, 0)


def test_claims_are_whole_pages_and_no_more_than_asked() -> None:
    two = pointers("x" * 8)
    assert two.claim_compute(2 * PAGE + 63) == pages(0, 2)
    assert two.claim_load(PAGE + 1) == pages(7, 8)
    for less_than_a_page in (PAGE - 1, 0, -PAGE):
        assert two.claim_compute(less_than_a_page) is None
        assert two.claim_load(less_than_a_page) is None


def test_loads_may_take_everything() -> None:
    two = pointers("xxxx")
    whole = load(two, 99)
    assert whole == pages(0, 4)
    assert two.meeting
    two.landed(whole)
    assert two.jump() == whole
    assert two.finished
    assert two.computed_tokens == 0


def test_compute_may_take_everything_and_there_is_no_jump() -> None:
    two = pointers("xxxx")
    assert compute(two, 4) == pages(0, 4)
    assert two.jump() is None
    assert two.claim_load(PAGE) is None
    assert two.finished


def test_a_jump_waits_for_all_loads_of_its_segment_in_any_order() -> None:
    two = pointers("x" * 4)
    high, low = load(two, 2), load(two, 1)
    compute(two, 1)
    two.landed(low)
    assert two.jump() is None
    two.landed(high)
    assert two.jump() == pages(1, 4)


def test_a_jump_does_not_wait_for_the_loads_of_the_next_segment() -> None:
    two = pointers("xx-x")
    first = load(two, 2)
    load(two, 1)
    two.landed(first)
    assert two.jump() == pages(0, 2)
    assert compute(two, 1) == pages(2, 3)
    assert two.meeting


def test_a_hole_is_computed_and_what_lies_behind_it_is_loaded_meanwhile() -> None:
    two = pointers("--xx")
    assert load(two, 99) == pages(2, 4)
    assert two.claim_load(PAGE) is None
    assert compute(two, 99) == pages(0, 2)
    two.landed(pages(2, 4))
    assert two.jump() == pages(2, 4)


def test_each_segment_has_its_own_jump_front_to_back() -> None:
    two = pointers("-xx-xx")
    assert load(two, 99) == pages(1, 3)  # front-most first
    assert load(two, 99) == pages(4, 6)
    two.landed(pages(4, 6))
    assert two.jump() is None
    two.landed(pages(1, 3))
    assert compute(two, 99) == pages(0, 1)
    assert two.jump() == pages(1, 3)
    assert (two.position, two.load_pointer) == (3 * PAGE, 4 * PAGE)
    assert compute(two, 99) == pages(3, 4)
    assert two.jump() == pages(4, 6)
    assert two.finished


def test_a_segment_computed_to_its_end_is_left_without_a_jump() -> None:
    two = pointers("xx-x")
    compute(two, 2)
    assert (two.position, two.load_pointer) == (2 * PAGE, 4 * PAGE)
    assert two.jump() is None
    assert compute(two, 99) == pages(2, 4)
    assert two.finished


def test_a_failed_load_becomes_a_hole_between_two_jumps() -> None:
    two = pointers("x" * 8)
    high, middle, low = load(two, 2), load(two, 2), load(two, 2)
    two.failed(middle)
    two.landed(high)
    two.landed(low)
    assert compute(two, 99) == pages(0, 2)
    assert two.jump() == low
    assert two.claim_load(PAGE) is None  # it isn't tried again
    assert compute(two, 99) == middle
    assert two.jump() == high
    assert two.finished
    assert (two.loaded_tokens, two.failed_tokens) == (4 * PAGE, 2 * PAGE)


def test_compute_goes_on_over_a_load_that_failed_before_it() -> None:
    two = pointers("x" * 4)
    tail = load(two, 2)
    compute(two, 2)
    assert two.meeting
    two.failed(tail)
    assert not two.meeting
    assert compute(two, 99) == tail
    assert two.finished


def test_loads_go_on_below_one_that_failed() -> None:
    two = pointers("x" * 4)
    two.failed(load(two, 1))
    assert load(two, 1) == pages(2, 3)


def test_once_loading_is_stopped_compute_takes_the_rest_but_what_was_claimed_still_counts() -> None:
    two = pointers("xx-xxx-xx")
    first = load(two, 1)
    two.stop_loading()
    assert two.loading_stopped
    assert two.claim_load(PAGE) is None
    assert compute(two, 99) == pages(0, 1)
    two.landed(first)
    assert two.jump() == pages(1, 2)
    assert compute(two, 99) == pages(2, 9)  # whole chunks: segments don't matter any more
    assert two.finished


def test_holes_that_only_compute_fills_do_not_cut_its_chunks_once_loading_is_stopped() -> None:
    two = pointers("x-x-xxxx")
    compute(two, 1)
    last = [load(two, 1), load(two, 1), load(two, 1)]
    assert last == [pages(2, 3), pages(7, 8), pages(6, 7)]
    two.stop_loading()
    two.failed(last[0])
    assert compute(two, 99) == pages(1, 6)
    two.landed(last[1])
    two.failed(last[2])
    assert compute(two, 99) == pages(6, 7)
    assert two.jump() == pages(7, 8)
    assert two.finished


def test_the_end_of_a_compute_claim_can_be_returned_and_loaded_instead() -> None:
    two = pointers("xxxx")
    compute(two, 4)
    two.return_compute(2 * PAGE)
    assert not two.finished
    assert (two.position, two.computed_tokens) == (2 * PAGE, 2 * PAGE)
    assert load(two, 99) == pages(2, 4)


def test_only_the_last_compute_claim_can_be_returned() -> None:
    two = pointers("xx-xxx")
    with pytest.raises(ValueError, match="not in the last compute claim"):
        two.return_compute(0)
    compute(two, 1)
    compute(two, 1)
    for outside in (0, 3 * PAGE):
        with pytest.raises(ValueError, match="not in the last compute claim"):
            two.return_compute(outside)
    with pytest.raises(ValueError, match="not a multiple"):
        two.return_compute(PAGE + 1)
    two.return_compute(PAGE)
    with pytest.raises(ValueError, match="not in the last compute claim"):
        two.return_compute(2 * PAGE)  # what was returned may be someone else's by now
    tail = load(two, 1)
    two.landed(tail)
    assert two.jump() == tail
    with pytest.raises(ValueError, match="not in the last compute claim"):
        two.return_compute(PAGE)


def test_a_claim_that_found_no_room_ends_the_claim_before_it_too() -> None:
    two = pointers("xx-x")
    compute(two, 2)
    load(two, 1)
    assert two.claim_compute(0) is None
    with pytest.raises(ValueError, match="not in the last compute claim"):
        two.return_compute(PAGE)
    assert two.position == 2 * PAGE


def test_returning_does_not_touch_the_next_segment() -> None:
    two = pointers("xx-x")
    compute(two, 2)
    assert load(two, 1) == pages(3, 4)
    two.return_compute(0)
    assert (two.position, two.load_pointer) == (0, 2 * PAGE)
    assert load(two, 2) == pages(0, 2)


def test_a_load_ends_once() -> None:
    two = pointers("xxxx")
    claim = load(two, 1)
    two.landed(claim)
    for end in (two.landed, two.failed):
        with pytest.raises(ValueError, match="not on its way"):
            end(claim)
    with pytest.raises(ValueError, match="not on its way"):
        two.landed(pages(0, 1))


@pytest.mark.parametrize(
    ("segments", "page"),
    [
        ([], PAGE),
        ([Segment(0, 0, 64)], 0),
        ([Segment(0, 0, 64), Segment(128, 128, 192)], PAGE),
        ([Segment(64, 64, 128), Segment(0, 0, 64)], PAGE),
        ([Segment(0, 0, 65)], PAGE),
        ([Segment(0, 1, 64)], PAGE),
        ([Segment(1, 64, 128)], PAGE),
    ],
)
def test_segments_must_fit(segments: list[Segment], page: int) -> None:
    with pytest.raises(ValueError, match="segments"):
        TwoPointers(segments, page)


def test_waits_end_with_what_they_wait_for_or_with_time() -> None:
    two = pointers("xxxx")
    assert two.wait_for_loads(0)
    assert not two.wait_for_change(0)
    first, second = load(two, 1), load(two, 1)
    two.landed(first)
    assert two.wait_for_change(0)
    assert not two.wait_for_change(0)  # told once
    assert not two.wait_for_loads(0)
    threading.Timer(0.01, two.failed, [second]).start()
    assert two.wait_for_loads(None)
    assert two.wait_for_change(0)


def test_a_broken_state_is_told_with_a_picture() -> None:
    two = pointers("xxxx")
    load(two, 1)
    two._pairs[0].load_pointer = 2 * PAGE
    with pytest.raises(AssertionError, match=r"lost or counted twice: (.*\n)*.*load_pointer=128"):
        two.check_integrity()


SEEN = [
    name
    for name, member in vars(TwoPointers).items()
    if isinstance(member, property) and not name.startswith("_")
]


@pytest.mark.parametrize(
    "touch",
    [
        lambda two: two.claim_compute(PAGE),
        lambda two: two.return_compute(0),
        lambda two: two.jump(),
        lambda two: two.claim_load(PAGE),
        lambda two: two.landed(pages(3, 4)),
        lambda two: two.failed(pages(3, 4)),
        lambda two: two.stop_loading(),
        lambda two: two.wait_for_loads(0),
        lambda two: two.wait_for_change(0),
        lambda two: two.check_integrity(),
        *(operator.attrgetter(name) for name in SEEN),
    ],
)
def test_everything_takes_its_turn(touch: Callable[[TwoPointers], object]) -> None:
    two = pointers("xxxx")
    compute(two, 1)
    load(two, 1)
    with ThreadPoolExecutor(1) as pool:
        with two._lock:
            turn = pool.submit(touch, two)
            with pytest.raises(TimeoutError):
                turn.result(0.01)
        turn.result(10)


@pytest.fixture
def busy_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Lanes:
    """Two I/O lanes and a compute lane, each a thread that claims at random; what each has done."""

    def __init__(self, two: TwoPointers, seed: int) -> None:
        self.two = two
        self.seed = seed
        self.loaded: list[Span] = []
        self.failed: list[Span] = []
        self.computed: list[Span] = []

    def run(self) -> None:
        """Until all three see that the restore is finished; what one raises comes out here."""
        with ThreadPoolExecutor(3) as pool:
            lanes = [pool.submit(self.io_lane, 1), pool.submit(self.io_lane, 2)]
            lanes.append(pool.submit(self.compute_lane))
            for lane in lanes:
                lane.result()

    def io_lane(self, number: int) -> None:
        choice = random.Random(f"{self.seed} {number}")
        while not self.two.finished:
            claim = self.two.claim_load(choice.randint(1, 3) * PAGE)
            if claim is None:
                self.two.wait_for_change(0.001)
            elif choice.random() < 0.05:
                self.failed.append(claim)
                self.two.failed(claim)
            else:
                self.loaded.append(claim)
                self.two.landed(claim)

    def compute_lane(self) -> None:
        choice = random.Random(f"{self.seed} compute")
        while not self.two.finished:
            claim = self.two.claim_compute(choice.randint(1, 4) * PAGE)
            if claim is None:
                self.two.jump()
                continue
            keep = claim.stop if choice.random() < 0.8 else claim.start + PAGE
            self.two.return_compute(keep)
            self.computed.append(Span(claim.start, keep))


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize("seed", range(3))
def test_two_io_lanes_and_compute_do_every_page_once(seed: int) -> None:
    drawn = random.Random(seed).choices("x-", weights=[20, 1], k=12_000)
    two = pointers("".join([*drawn, "x"]))
    lanes = Lanes(two, seed)
    lanes.run()
    two.check_integrity()
    done = lanes.loaded + lanes.computed
    times = Counter(page for claim in done for page in range(claim.start, claim.stop, PAGE))
    assert times == Counter(range(0, 12_001 * PAGE, PAGE))
    assert len(done) > 3000
    assert two.failed_tokens == sum(claim.tokens for claim in lanes.failed) > 0
    assert two.loaded_tokens == sum(claim.tokens for claim in lanes.loaded) > 0
    assert two.computed_tokens == sum(claim.tokens for claim in lanes.computed) > 0
    assert two.loaded_tokens == sum(jump.tokens for jump in two.jumps)
