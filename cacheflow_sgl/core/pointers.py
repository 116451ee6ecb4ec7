"""Who brings which tokens of a restore back: the two pointers of CacheFlow (arXiv 2604.25080).

    start      loadable_from                                        stop
      |   hole   |                                                    |
      | computed >>> compute pointer  ... gap ...  load pointer <<< loaded |

The compute pointer rises from the front, the load pointer comes down from the tail. A lane claims
tokens before it works on them, so every token is claimed once, and where the pointers meet is
decided at run time by who is faster.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cacheflow_sgl.core.geometry import Segment, Span, page_floor


@dataclass(slots=True)
class _Pair:
    """One segment with its two pointers.

    [start, compute_pointer) is claimed by compute, [load_pointer, stop) by loads: on their way or
    landed. A jump takes both pointers to `stop`.
    """

    start: int
    loadable_from: int
    stop: int
    compute_pointer: int
    load_pointer: int
    in_flight: set[Span] = field(default_factory=set)

    @classmethod
    def of(cls, segment: Segment) -> _Pair:
        return cls(segment.start, segment.loadable_from, segment.stop, segment.start, segment.stop)

    @property
    def done(self) -> bool:
        return self.compute_pointer == self.stop

    @property
    def gap(self) -> int:
        """Unclaimed tokens."""
        return self.load_pointer - self.compute_pointer

    @property
    def loadable(self) -> int:
        """Unclaimed tokens that a load may still take."""
        return max(self.load_pointer - max(self.compute_pointer, self.loadable_from), 0)

    @property
    def claimed_by_loads(self) -> int:
        """Tokens on their way or landed."""
        return self.stop - self.load_pointer

    def cut(self, failed: Span) -> tuple[_Pair, _Pair]:
        """What lies below the failed claim (maybe nothing), and a new hole with what lies above."""
        below = _Pair(
            self.start,
            self.loadable_from,
            failed.start,
            self.compute_pointer,
            self.load_pointer,
            {claim for claim in self.in_flight if claim < failed},
        )
        above = _Pair(
            failed.start,
            failed.stop,
            self.stop,
            failed.start,
            failed.stop,
            {claim for claim in self.in_flight if claim > failed},
        )
        return below, above

    def joined(self, above: _Pair) -> _Pair:
        """This pair, of which nothing will be loaded, as the front of the hole of the next one."""
        return _Pair(
            self.start,
            above.loadable_from,
            above.stop,
            self.compute_pointer,
            above.load_pointer,
            above.in_flight,
        )

    def fault(self, page: int) -> str | None:
        """What is wrong with it, if anything."""
        claims = sorted(self.in_flight)
        if not self.start <= self.compute_pointer <= self.load_pointer <= self.stop:
            return "the pointers have passed each other or left their segment"
        if not self.start <= self.loadable_from <= self.load_pointer:
            return "a hole is claimed by a load"
        if any(lower.stop > upper.start for lower, upper in pairwise(claims)):
            return "claims overlap"
        if claims and not self.load_pointer <= claims[0].start <= claims[-1].stop <= self.stop:
            return "a claim lies outside of what loads have claimed"
        ends = (self.start, self.loadable_from, self.stop, self.compute_pointer, self.load_pointer)
        return "not whole pages" if any(end % page for end in ends) else None


class TwoPointers:
    """Claims on the tokens of one restore; compute goes up from the front, loads come down.

    Spans, pointers and counts are in tokens; claims are whole pages. One thread is the compute
    lane; any number of threads may be I/O lanes, and loads may land in any order. The restore has
    `finished` when every token is computed or jumped over.
    """

    def __init__(self, segments: Sequence[Segment], page: int) -> None:
        """`ValueError` unless the segments are contiguous, ascending and of whole pages."""
        if not segments or page < 1:
            raise ValueError(f"nothing to restore: {len(segments)} segments, pages of {page}")
        if any(low.stop != high.start for low, high in pairwise(segments)):
            raise ValueError(f"segments must follow each other without gaps: {segments}")
        if any(end % page for s in segments for end in (s.start, s.loadable_from, s.stop)):
            raise ValueError(f"segments must be whole pages of {page} tokens: {segments}")
        self._page = page
        self._whole = Span(segments[0].start, segments[-1].stop)
        # Compute has begun in the first only; pairs that are done are kept until the next claim.
        self._pairs = [_Pair.of(segment) for segment in segments]
        self._returnable: Span | None = None  # the last compute claim
        self._jumps: list[Span] = []
        self._stopped = False
        self._loaded = 0
        self._failed = 0
        self._ended = 0  # loads that landed or failed
        self._noticed = 0  # how many of these `wait_for_change` has told of
        self._lock = threading.Condition()

    # -- the compute lane (one thread)

    def claim_compute(self, tokens: int) -> Span | None:
        """Claim up to `tokens` tokens from the compute pointer up, not past the load pointer.

        None where no page is free there, or `tokens` is less than a page.
        """
        with self._lock:
            self._leave_done()
            self._returnable = None
            pair = self._pairs[0]
            take = min(page_floor(tokens, self._page), pair.gap)
            if take <= 0:
                return None
            claim = Span(pair.compute_pointer, pair.compute_pointer + take)
            pair.compute_pointer = claim.stop
            self._returnable = claim
            return claim

    def return_compute(self, keep_until: int) -> None:
        """Give back [keep_until, stop) of the last compute claim: unclaimed again.

        `ValueError` where `keep_until` is not the start of a page of that claim or its stop, or
        `claim_compute` or a jump came after it.
        """
        with self._lock:
            claim = self._returnable
            if claim is None or not claim.start <= keep_until <= claim.stop:
                raise ValueError(f"{keep_until} is not in the last compute claim, {claim}")
            if keep_until % self._page:
                raise ValueError(f"{keep_until} is not a multiple of the page, {self._page}")
            self._pairs[0].compute_pointer = keep_until
            self._returnable = Span(claim.start, keep_until)

    def jump(self) -> Span | None:
        """Pass over what was loaded of the current segment, and go on to the next one.

        Possible once its pointers have met and none of its loads is on its way: then the span from
        the meeting point to the end of the segment. None before, and where nothing was loaded.
        """
        with self._lock:
            pair = self._current
            if pair.gap or pair.in_flight or not pair.claimed_by_loads:
                return None
            over = Span(pair.load_pointer, pair.stop)
            pair.compute_pointer = pair.load_pointer = pair.stop
            self._leave_done()
            self._returnable = None
            self._jumps.append(over)
            return over

    # -- I/O lanes (any thread)

    def claim_load(self, tokens: int) -> Span | None:
        """Claim up to `tokens` tokens from a load pointer down.

        In the front-most segment with room; not past the compute pointer, nor into a hole. None
        where nothing is left to load (for now: a compute claim may be returned), or `tokens` is
        less than a page. Each claim must end in `landed` or `failed`.
        """
        with self._lock:
            pair = next((pair for pair in self._pairs if pair.loadable), None)
            take = page_floor(tokens, self._page)
            if self._stopped or pair is None or take <= 0:
                return None
            claim = Span(pair.load_pointer - min(take, pair.loadable), pair.load_pointer)
            pair.load_pointer = claim.start
            pair.in_flight.add(claim)
            return claim

    def landed(self, claim: Span) -> None:
        """The claim's tokens are there. `ValueError` where it is not on its way."""
        with self._lock:
            self._pairs[self._index_of(claim)].in_flight.remove(claim)
            self._loaded += claim.tokens
            self._note_end()

    def failed(self, claim: Span) -> None:
        """The claim's tokens will not come: they become a hole, and compute must go over them.

        The segment is cut there; what is loaded below and above stays useful. To be called when
        nothing can write to these tokens any more. `ValueError` where it is not on its way.
        """
        with self._lock:
            index = self._index_of(claim)
            self._pairs[index : index + 1] = self._pairs[index].cut(claim)
            self._failed += claim.tokens
            if self._stopped:
                self._join_unloaded()
            self._note_end()

    def stop_loading(self) -> None:
        """No load claims from now on: compute takes what is unclaimed; loads on their way go on."""
        with self._lock:
            self._stopped = True
            self._join_unloaded()

    # -- what can be seen

    @property
    def position(self) -> int:
        """The compute pointer: all tokens below it are computed (or claimed so) or jumped over."""
        with self._lock:
            return self._current.compute_pointer

    @property
    def load_pointer(self) -> int:
        """The load pointer of the current segment."""
        with self._lock:
            return self._current.load_pointer

    @property
    def gap(self) -> int:
        """Unclaimed tokens between the two pointers of the current segment."""
        with self._lock:
            return self._current.gap

    @property
    def meeting(self) -> bool:
        """The pointers of the current segment have met, but loads are on their way: wait."""
        with self._lock:
            return not self._current.gap and bool(self._current.in_flight)

    @property
    def finished(self) -> bool:
        """Every token is computed (or claimed so) or jumped over."""
        with self._lock:
            return self._current.done

    @property
    def loads_in_flight(self) -> int:
        """How many load claims are on their way."""
        with self._lock:
            return sum(len(pair.in_flight) for pair in self._pairs)

    @property
    def loading_stopped(self) -> bool:
        """Whether `stop_loading` was called."""
        with self._lock:
            return self._stopped

    @property
    def computed_tokens(self) -> int:
        """Tokens claimed by compute and not returned."""
        with self._lock:
            jumped = sum(jump.tokens for jump in self._jumps)
            return self._current.compute_pointer - self._whole.start - jumped

    @property
    def loaded_tokens(self) -> int:
        """Tokens that landed; at the end all of them have been jumped over."""
        with self._lock:
            return self._loaded

    @property
    def failed_tokens(self) -> int:
        """Tokens of load claims that failed."""
        with self._lock:
            return self._failed

    @property
    def jumps(self) -> tuple[Span, ...]:
        """The spans jumped over so far, front to back."""
        with self._lock:
            return tuple(self._jumps)

    def wait_for_loads(self, timeout_s: float | None) -> bool:
        """Wait until no load is on its way; False where that took longer than the timeout."""
        with self._lock:
            return self._lock.wait_for(lambda: not self.loads_in_flight, timeout_s)

    def wait_for_change(self, timeout_s: float) -> bool:
        """Wait until a load has landed or failed since this last returned; False after timeout."""
        with self._lock:
            changed = self._lock.wait_for(lambda: self._ended != self._noticed, timeout_s)
            self._noticed = self._ended
            return changed

    def check_integrity(self) -> None:
        """`AssertionError`, with a full picture, where any two facts contradict each other."""
        with self._lock:
            fault = next((f for pair in self._pairs if (f := pair.fault(self._page))), None)
            fault = fault or self._fault()
            if fault is not None:
                raise AssertionError(f"{fault}: {self._picture()}")

    # -- inside, under the lock

    @property
    def _current(self) -> _Pair:
        """The first pair that isn't done; once all are, the last."""
        return next((pair for pair in self._pairs if not pair.done), self._pairs[-1])

    def _leave_done(self) -> None:
        while self._pairs[0].done and len(self._pairs) > 1:
            del self._pairs[0]

    def _join_unloaded(self) -> None:
        """Make one of neighbours between which nothing is loaded, so that chunks stay whole."""
        joined: list[_Pair] = []
        for pair in self._pairs:
            if joined and not joined[-1].claimed_by_loads:
                joined.append(joined.pop().joined(pair))
            else:
                joined.append(pair)
        self._pairs = joined

    def _index_of(self, claim: Span) -> int:
        for index, pair in enumerate(self._pairs):
            if claim in pair.in_flight:
                return index
        raise ValueError(f"{claim} is not on its way")

    def _note_end(self) -> None:
        self._ended += 1
        self._lock.notify_all()

    def _fault(self) -> str | None:
        """What is wrong between the pairs, the jumps and the counts, if anything."""
        pairs, jumps = self._pairs, self._jumps
        if any(low.stop != high.start for low, high in pairwise(pairs)):
            return "tokens between segments are lost"
        if pairs[-1].stop != self._whole.stop:
            return "tokens at the end are lost"
        if any(pair.compute_pointer != pair.start for pair in pairs[1:]):
            return "compute is ahead of itself"
        if any(low.stop > high.start for low, high in pairwise(jumps)):
            return "jumps overlap"
        claimed = sum(pair.claimed_by_loads for pair in pairs) + sum(j.tokens for j in jumps)
        in_flight = sum(claim.tokens for pair in pairs for claim in pair.in_flight)
        return None if claimed == self._loaded + in_flight else "loads were lost or counted twice"

    def _picture(self) -> str:
        lines = [f"pages of {self._page}, whole {self._whole}, jumps {self._jumps}"]
        lines += [str(pair) for pair in self._pairs]
        lines += [f"loaded {self._loaded}, failed {self._failed}, stopped {self._stopped}"]
        return "\n".join(lines)
