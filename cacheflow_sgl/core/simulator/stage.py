"""One pipeline stage: its compute lane, its links, and the batch that shares them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cacheflow_sgl.core.batch import Candidate, batch
from cacheflow_sgl.core.geometry import Span
from cacheflow_sgl.core.simulator.jobs import Job, Landing, Progress
from cacheflow_sgl.core.simulator.restores import Forward, Load
from cacheflow_sgl.core.simulator.result import NOBODY, Lane, Piece

if TYPE_CHECKING:
    from cacheflow_sgl.core.simulator.simulation import Simulation


@dataclass(slots=True)
class _Busy:
    """A lane and what it was given: until when it is busy, in truth and as predicted."""

    lane: Lane
    pieces: int = 0
    """Given and not ended."""
    end_s: float = 0.0
    expected_end_s: float = 0.0

    @property
    def idle(self) -> bool:
        return not self.pieces

    def left_s(self, now_s: float) -> float:
        """Predicted seconds until it is free."""
        return max(self.expected_end_s - now_s, 0.0) if self.pieces else 0.0

    def give(self, now_s: float, expected_s: float) -> float:
        """Give it one more piece, which takes its turn; when that starts."""
        self.expected_end_s = now_s + self.left_s(now_s) + expected_s
        self.pieces += 1
        return max(now_s, self.end_s)


class Stage:
    """Lanes of one stage. Asked to `dispatch` after every event, it gives work to those idle."""

    def __init__(self, simulation: Simulation, index: int) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._index = index
        self._layers = self._world.compute.layers // simulation.setup.stages
        self._batch = batch(simulation.setup.policy)
        self._jobs: dict[str, Job] = {}
        self._compute = _Busy(Lane())
        self._links = [_Busy(Lane()) for _ in self._world.links]
        self._owed_steps = 0
        self._refused: list[Job] = []
        """Named when there was no place for them among those that run."""

    def lanes(self) -> Iterator[tuple[str, Lane]]:
        """Names and lanes."""
        yield f"compute {self._index}", self._compute.lane
        for tier, link in enumerate(self._links):
            yield f"I/O {self._index}.{tier}", link.lane

    def add(self, job: Job) -> None:
        """Take a request in that was just admitted."""
        progress = job.stages[self._index]
        request = job.request
        suffix = Span(progress.suffix_at, request.prompt_tokens)
        progress.candidate = Candidate(
            rid=str(request.rid),
            order=request.rid,
            arrived_s=job.served.arrived_s,
            compute_s=0.0,
            load_s=0.0,
            suffix_s=self._simulation.beliefs.compute.span_s(
                suffix.start, suffix.stop, self._world.chunk, self._layers
            ),
            can_compute=False,
            tiers=(),
        )
        self._jobs[progress.candidate.rid] = job
        self._look_at(job)
        self._batch.add(progress.candidate)

    def refresh(self, job: Job) -> None:
        """Something has changed for a request: tell the policy."""
        if job.stages[self._index].candidate.rid in self._jobs:
            self._look_at(job)
            self._batch.update(job.stages[self._index].candidate)

    def dispatch(self) -> None:
        """Give every idle lane its next piece."""
        if self._compute.idle:
            self._start_compute()
        # What one link takes may change what there is for another: ask until all are content.
        while self._start_loads():
            pass
        # Last, for how many steps fit in depends on what happens next.
        if self._compute.idle:
            self._decode()

    # -- what the policy sees

    def _look_at(self, job: Job) -> None:
        progress = job.stages[self._index]
        candidate, restore = progress.candidate, progress.restore
        suffix_now = progress.suffix_from_s <= self._simulation.now_s
        candidate.can_compute = suffix_now and job.next_suffix(self._index, 1) is not None
        candidate.tiers = ()
        candidate.ready_s = self._ready_s(progress)
        candidate.step_s = self._step_s(job)
        candidate.step_load_s = 0.0 if restore is None else restore.step_load_s
        if restore is not None and not restore.complete and self._may_restore(job):
            candidate.compute_s = restore.compute_left_s
            candidate.load_s = restore.load_left_s
            candidate.can_compute |= not restore.closing
            candidate.tiers = restore.load_tiers
        elif restore is None or restore.complete:
            candidate.compute_s = candidate.load_s = 0.0

    def _ready_s(self, progress: Progress) -> float:
        """When a suffix is predicted to be able to follow its loads."""
        restore = progress.restore
        if restore is None or not restore.closing or progress.suffix_begun:
            return math.inf
        # By belief, also where the simulation knows already: nobody knows what a link will do.
        return self._now + restore.follows_in(self._link_waits_s())

    def _step_s(self, job: Job) -> float:
        """Predicted seconds of its next forward."""
        progress = job.stages[self._index]
        if progress.restore is not None and not progress.restore.closing:
            return progress.restore.step_s
        suffix = job.next_suffix(self._index, self._world.chunk)
        if suffix is None:
            return 0.0
        compute = self._simulation.beliefs.compute
        return compute.seconds(suffix.start, suffix.tokens, self._layers)

    def _link_waits_s(self) -> list[float]:
        return [link.left_s(self._now) for link in self._links]

    def _may_restore(self, job: Job) -> bool:
        return self._simulation.may_restore(job, self._index)

    # -- the compute lane

    def _start_compute(self) -> None:
        if self._owed_steps and self._decode():
            return
        while (candidate := self._batch.next_compute(self._now)) is not None:
            job = self._jobs[candidate.rid]
            if not self._simulation.may_run(job):
                if not any(map(self._simulation.runs, self._jobs.values())):
                    return
                self._refuse(job)
                continue
            if self._start_forward(job):
                return
            self._follow(job)
            self._look_at(job)
            candidate.can_compute = False
            self._batch.update(candidate)

    def _refuse(self, job: Job) -> None:
        """Let those that run go on before it: without them no place becomes free for it."""
        candidate = job.stages[self._index].candidate
        candidate.can_compute, candidate.ready_s = False, math.inf
        self._batch.update(candidate)
        self._refused.append(job)

    def place_free(self) -> None:
        """A request that was refused may run now."""
        refused, self._refused = self._refused, []
        for job in refused:
            self.refresh(job)

    def _start_forward(self, job: Job) -> bool:
        progress = job.stages[self._index]
        restore = progress.restore
        if restore is not None and not restore.closing and self._may_restore(job):
            forward = restore.next_forward(self._link_waits_s())
            if forward is not None:
                self._run(job, "prefix", forward)
                return True
            self._queue_last_loads(job)
        suffix = job.next_suffix(self._index, self._world.chunk)
        if suffix is None or progress.suffix_from_s > self._now:
            return False
        progress.suffix_begun = True
        ended = partial(self._suffix_done, job, suffix)
        self._run(job, "suffix", Forward(suffix, self._layers, ended))
        return True

    def _run(self, job: Job, what: str, forward: Forward) -> None:
        span, layers = forward.span, forward.layers
        seconds = self._world.compute.seconds(span.start, span.tokens, layers)
        expected_s = self._simulation.beliefs.compute.seconds(span.start, span.tokens, layers)
        start_s = self._compute.give(self._now, expected_s)
        self._note(
            self._compute, Piece(job.request.rid, what, start_s, start_s + seconds, span, layers)
        )
        self._simulation.after(seconds, partial(self._forward_ended, job, forward, seconds))
        self.refresh(job)

    def _forward_ended(self, job: Job, forward: Forward, seconds: float) -> None:
        self._compute.pieces -= 1
        self._owed_steps = self._simulation.setup.decode_steps
        span = forward.span
        self._simulation.beliefs.observe_forward(span.start, span.tokens, forward.layers, seconds)
        forward.ended()
        self._changed(job)

    def _suffix_done(self, job: Job, suffix: Span) -> None:
        job.stages[self._index].suffix_at = suffix.stop

    def _decode(self) -> bool:
        decodes = self._simulation.decodes
        if self._index or not len(decodes):
            return False
        steps, seconds = decodes.steps_within(self._simulation.until_next_event_s)
        if self._owed_steps:
            steps, seconds = 1, seconds / steps
            self._owed_steps -= 1
        start_s = self._compute.give(self._now, seconds)
        self._note(
            self._compute,
            Piece(NOBODY, "decode", start_s, start_s + seconds, Span(0, 0), self._layers),
        )
        self._simulation.after(seconds, partial(self._decoded, steps, seconds))
        return True

    def _decoded(self, steps: int, seconds: float) -> None:
        self._compute.pieces -= 1
        self._batch.note_decode(self._now, seconds)
        self._simulation.decoded(steps)

    # -- the links

    def _start_loads(self) -> bool:
        """Ask for every idle link; whether anything was started."""
        started = False
        for tier, link in enumerate(self._links):
            if link.idle:
                started |= self._start_load(tier, link)
        return started

    def _start_load(self, tier: int, link: _Busy) -> bool:
        while (candidate := self._batch.next_load(tier)) is not None:
            job = self._jobs[candidate.rid]
            restore = job.stages[self._index].restore
            assert restore is not None, "only restores load"
            load = restore.next_load(tier, self._compute.left_s(self._now))
            if load is not None:
                self._transfer(job, link, load)
                return True
            self._look_at(job)
            candidate.tiers = tuple(each for each in candidate.tiers if each != tier)
            self._batch.update(candidate)
        return False

    def _queue_last_loads(self, job: Job) -> None:
        """Give the links what is left of a request that has just closed, for its suffix is next."""
        restore = job.stages[self._index].restore
        if restore is None or not restore.closing:
            return
        for tier in restore.load_tiers:
            load = restore.next_load(tier, 0.0)
            assert load is not None, "the tier of a last load has one"
            self._transfer(job, self._links[tier], load)

    def _transfer(self, job: Job, link: _Busy, load: Load) -> None:
        expected_s = self._simulation.beliefs.links[load.tier].seconds(load.nbytes)
        start_s = link.give(self._now, expected_s)
        end_s = self._world.links[load.tier].end_s(start_s, load.nbytes)
        layers = load.stop_layer - load.first_layer
        self._note(link, Piece(job.request.rid, load.what, start_s, end_s, load.span, layers))
        landing = Landing(start_s, end_s, load.first_layer, load.stop_layer)
        job.stages[self._index].landings[id(landing)] = landing
        ended = partial(self._load_ended, job, link, load, landing)
        self._simulation.after(end_s - self._now, ended)
        self._follow(job)
        self.refresh(job)

    def _load_ended(self, job: Job, link: _Busy, load: Load, landing: Landing) -> None:
        link.pieces -= 1
        del job.stages[self._index].landings[id(landing)]
        seconds = landing.end_s - landing.start_s
        self._simulation.beliefs.observe_load(load.tier, load.nbytes, seconds)
        if load.what == "load":
            job.served.loaded_bytes += load.nbytes
        load.ended()
        self._changed(job)

    def _follow(self, job: Job) -> None:
        """Once all is claimed: start the suffix so late that it never waits for a layer.

        With foresight, for every engine alike: a real GPU is held while a layer is late.
        """
        progress = job.stages[self._index]
        if progress.restore is None or not progress.restore.all_claimed:
            return
        if progress.suffix_from_s < math.inf:
            return
        suffix = job.next_suffix(self._index, self._world.chunk)
        suffix_s = 0.0
        if suffix is not None:
            suffix_s = self._world.compute.seconds(suffix.start, suffix.tokens, self._layers)
        starts = [each.earliest_s(suffix_s, self._layers) for each in progress.landings.values()]
        wait_s = max(max(starts, default=self._now) - self._now, 0.0)
        progress.suffix_from_s = self._now + wait_s  # to the bit when that event will be
        self._simulation.after(wait_s, partial(self._changed, job))

    # -- both

    def _changed(self, job: Job) -> None:
        """A piece of a request has ended here: what follows from that, here and downstream."""
        self._follow(job)
        progress = job.stages[self._index]
        restore = progress.restore
        if restore is not None and restore.complete:
            progress.suffix_from_s = min(progress.suffix_from_s, self._now)
            job.served.restored_s = max(job.served.restored_s, self._now)
            progress.restore = None
        if progress.suffix_at == job.request.prompt_tokens and progress.restore is None:
            self._leave(job)
        self._simulation.changed(job, self._index)

    def _leave(self, job: Job) -> None:
        rid = job.stages[self._index].candidate.rid
        if self._jobs.pop(rid, None) is not None:
            self._batch.remove(rid)

    @property
    def _now(self) -> float:
        return self._simulation.now_s

    def _note(self, busy: _Busy, piece: Piece) -> None:
        busy.end_s = piece.stop_s
        busy.lane.busy_s += piece.stop_s - piece.start_s
        if self._simulation.setup.record:
            busy.lane.pieces.append(piece)
