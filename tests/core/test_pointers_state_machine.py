"""Any interleaving of the lanes, against a model with one state a page."""

from __future__ import annotations

from enum import Enum, auto

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cacheflow_sgl.core.geometry import Segment, Span
from cacheflow_sgl.core.pointers import TwoPointers


class State(Enum):
    UNCLAIMED = auto()
    COMPUTED = auto()
    LOADING = auto()
    LANDED = auto()
    JUMPED = auto()


PASSED = (State.COMPUTED, State.JUMPED)
LOADED = (State.LOADING, State.LANDED)


class Model:
    """Pages of a restore, counted from its start: a state each, holes, and where segments end."""

    def __init__(self, shape: list[tuple[int, int]]) -> None:
        self.hole: list[bool] = []
        self.ends: list[int] = []  # of segments, in pages
        for missing, present in shape:
            self.hole += [True] * missing + [False] * present
            self.ends.append(len(self.hole))
        self.state = [State.UNCLAIMED] * len(self.hole)
        self.stopped = False

    @property
    def position(self) -> int:
        return next((i for i, s in enumerate(self.state) if s not in PASSED), len(self.state))

    def end_above(self, page: int) -> int:
        return next((end for end in self.ends if end > page), len(self.state))

    @property
    def gap(self) -> int:
        """Unclaimed pages from the position on; a segment's end bounds them while loads go on."""
        limit = len(self.state) if self.stopped else self.end_above(self.position)
        at = self.position
        while at < limit and self.state[at] is State.UNCLAIMED:
            at += 1
        return at - self.position

    def to_compute(self, count: int) -> range:
        return range(self.position, self.position + min(max(count, 0), self.gap))

    def to_load(self, count: int) -> range:
        """Down from the loads of the front-most segment where a page below them can be loaded."""
        for start, end in zip([0, *self.ends], self.ends, strict=False):
            high = end
            while high > start and self.state[high - 1] in LOADED:
                high -= 1
            low = high
            while low > max(start, high - count) and self.can_be_loaded(low - 1):
                low -= 1
            if low < high and not self.stopped:
                return range(low, high)
        return range(0)

    def can_be_loaded(self, page: int) -> bool:
        return self.state[page] is State.UNCLAIMED and not self.hole[page]

    def to_jump(self) -> range:
        over = range(self.position, self.end_above(self.position))
        return over if all(self.state[page] is State.LANDED for page in over) else range(0)

    @property
    def meeting(self) -> bool:
        here = range(self.position, self.end_above(self.position))
        return self.gap == 0 and any(self.state[page] is State.LOADING for page in here)

    def turn(self, pages: range, before: State, after: State) -> None:
        assert all(self.state[page] is before for page in pages), f"{pages} are not {before}"
        for page in pages:
            self.state[page] = after

    def fail(self, pages: range) -> None:
        self.turn(pages, State.LOADING, State.UNCLAIMED)
        for page in pages:
            assert not self.hole[page]
            self.hole[page] = True
        self.ends = sorted({*self.ends, pages.start} - {0})


segment_shapes = st.tuples(st.integers(0, 3), st.integers(0, 8)).filter(any)


class PointersMachine(RuleBasedStateMachine):
    """The lanes in any order; each answer is the one that the model gives."""

    @initialize(
        shape=st.lists(segment_shapes, min_size=1, max_size=5),
        first=st.integers(0, 3),
        page=st.sampled_from([1, 16]),
    )
    def start(self, shape: list[tuple[int, int]], first: int, page: int) -> None:
        self.page = page
        self.first = first
        self.model = Model(shape)
        segments = []
        start = first
        for missing, present in shape:
            ends = (start, start + missing, start + missing + present)
            segments.append(Segment(*(end * page for end in ends)))
            start = ends[-1]
        self.two = TwoPointers(segments, page)
        self.in_flight: list[range] = []
        self.returnable: range | None = None
        self.jumped: list[Span] = []
        self.landed = self.failed = 0

    def span(self, pages: range) -> Span:
        return Span((self.first + pages.start) * self.page, (self.first + pages.stop) * self.page)

    def answer(self, pages: range) -> Span | None:
        return self.span(pages) if pages else None

    @rule(count=st.integers(-1, 9), rest=st.integers(0, 15))
    def claim_compute(self, count: int, rest: int) -> None:
        pages = self.model.to_compute(count)
        claim = self.two.claim_compute(count * self.page + rest % self.page)
        assert claim == self.answer(pages)
        self.model.turn(pages, State.UNCLAIMED, State.COMPUTED)
        self.returnable = pages or None

    @rule(data=st.data())
    def return_compute(self, data: st.DataObject) -> None:
        near = self.returnable or range(self.model.position, self.model.position)
        keep = data.draw(st.integers(max(near.start - 1, 0), near.stop + 1))
        token = (self.first + keep) * self.page
        if self.returnable is None or not near.start <= keep <= near.stop:
            with pytest.raises(ValueError, match="not in the last compute claim"):
                self.two.return_compute(token)
            return
        self.two.return_compute(token)
        self.model.turn(range(keep, near.stop), State.COMPUTED, State.UNCLAIMED)
        self.returnable = range(near.start, keep)

    @rule()
    def jump(self) -> None:
        pages = self.model.to_jump()
        assert self.two.jump() == self.answer(pages)
        if pages:
            self.model.turn(pages, State.LANDED, State.JUMPED)
            self.jumped.append(self.span(pages))
            self.returnable = None

    @rule(count=st.integers(-1, 4), rest=st.integers(0, 15))
    def claim_load(self, count: int, rest: int) -> None:
        pages = self.model.to_load(count)
        claim = self.two.claim_load(count * self.page + rest % self.page)
        assert claim == self.answer(pages)
        self.model.turn(pages, State.UNCLAIMED, State.LOADING)
        if pages:
            self.in_flight.append(pages)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.in_flight)), lands=True)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.in_flight)), lands=False)

    def end(self, pages: range, lands: bool) -> None:
        self.in_flight.remove(pages)
        if lands:
            self.two.landed(self.span(pages))
            self.model.turn(pages, State.LOADING, State.LANDED)
            self.landed += len(pages)
        else:
            self.two.failed(self.span(pages))
            self.model.fail(pages)
            self.failed += len(pages)
        assert self.two.wait_for_change(0)

    @rule(dice=st.integers(1, 6))
    def stop_loading(self, dice: int) -> None:
        if dice == 6:  # seldom, or little would be loaded
            self.two.stop_loading()
            self.model.stopped = True

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "two"):
            return
        two, model, page = self.two, self.model, self.page
        two.check_integrity()
        position = (self.first + model.position) * page
        assert (two.position, two.gap) == (position, model.gap * page)
        assert two.load_pointer == position + model.gap * page
        assert two.meeting == model.meeting
        assert two.finished == (model.position == len(model.state))
        assert two.loads_in_flight == len(self.in_flight)
        assert two.loading_stopped == model.stopped
        assert two.computed_tokens == model.state.count(State.COMPUTED) * page
        assert two.loaded_tokens == self.landed * page
        assert two.failed_tokens == self.failed * page
        assert two.jumps == tuple(self.jumped)
        assert two.wait_for_loads(0) == (not self.in_flight)
        assert not two.wait_for_change(0)

    def teardown(self) -> None:
        """From any state, what is on its way ends, and compute brings the rest: always finished."""
        if not hasattr(self, "two"):
            return
        for number, pages in enumerate(list(self.in_flight)):
            self.end(pages, lands=number % 3 > 0)
        for _ in range(2 * len(self.model.state) + 1):
            if not self.two.finished:
                self.claim_compute(count=3, rest=0)
                self.jump()
        self.same_as_the_model()
        assert self.two.finished
        assert set(self.model.state) <= set(PASSED)
        whole = self.span(range(len(self.model.state)))
        assert self.two.position == whole.stop
        assert self.two.computed_tokens + self.two.loaded_tokens == whole.tokens
        assert self.two.loaded_tokens == sum(jump.tokens for jump in self.two.jumps)


TestPointersMachine = PointersMachine.TestCase
TestPointersMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
