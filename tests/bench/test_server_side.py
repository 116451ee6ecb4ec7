"""The hooks in the server, on stand-ins of what SGLang passes to them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow_sgl.bench import server_side
from cacheflow_sgl.bench.protocol import Control, Part, ServerEnd
from cacheflow_sgl.bench.server_side import Hooks, Link


@dataclass
class Bed:
    """A control, the hooks that follow it, and a server for them."""

    control: Control
    hooks: Hooks
    idle: bool = True
    locked: int = 0
    evicted: list[int] = field(default_factory=list)

    @property
    def scheduler(self) -> Any:
        return SimpleNamespace(is_fully_idle=lambda: self.idle, tree_cache=self)

    def empty(self, _tree: Any) -> bool:
        self.evicted.append(1)
        return self.locked == 0

    def acknowledged(self) -> int:
        return self.control._acknowledged()

    def want_eviction(self) -> None:
        with pytest.raises(Exception, match="did not evict"):
            self.control.evict_device(timeout_s=0)


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    control = Control(tmp_path / "settings.json")
    bed = Bed(control, Hooks(ServerEnd(control.path)))
    monkeypatch.setattr(server_side, "_emptied", bed.empty)
    return bed


def transfers(*tokens: int) -> list[Any]:
    pool = SimpleNamespace(size_per_token=100)
    return [SimpleNamespace(host_pool=pool, host_indices=range(count)) for count in tokens]


def test_a_copy_takes_as_long_as_the_throttle_says(bed: Bed):
    bed.control.set_rate(10_000)
    start = time.perf_counter()
    copied = bed.hooks.throttled(
        lambda engine, moved, **options: (engine, len(moved), options),
        "engine",
        transfers(3, 2),
        transfer_layer_id_max=4,
    )
    assert time.perf_counter() - start >= 500 / 10_000
    assert copied == ("engine", 2, {"transfer_layer_id_max": 4})
    (load,) = bed.control.new_log().loads
    assert load.nbytes == 500
    assert load.seconds >= 500 / 10_000


def test_without_a_rate_a_copy_does_not_wait(bed: Bed, monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    bed.hooks.throttled(lambda *_: None, "engine", transfers(10**9))
    assert slept == [0.0]


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1)), min_size=1))
def test_a_link_never_carries_more_than_its_rate(copies: list[tuple[int, float]]):
    link, now, first = Link(), 0.0, copies[0][1]
    arrivals = []
    for nbytes, pause in copies:
        now += pause
        arrivals.append(link.carry(nbytes, 100.0, now))
        assert arrivals[-1] >= now + nbytes / 100.0
    assert arrivals == sorted(arrivals)
    total = sum(nbytes for nbytes, _ in copies)
    assert arrivals[-1] - first >= total / 100.0 - 1e-9


def batch(*rows: tuple[str, int, int], extend: bool = True) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        reqs=[SimpleNamespace(rid=rid) for rid, _, _ in rows],
        prefix_lens=[start for _, start, _ in rows],
        extend_lens=[count for _, _, count in rows],
    )


def forward(worker: Any, batch: Any, *_: Any, **__: Any) -> str:
    time.sleep(0.01)
    return "result"


def test_a_forward_on_a_cpu_is_timed_and_named(bed: Bed):
    worker = SimpleNamespace(device="cpu")
    extends = batch(("a", 512, 100), ("b", 0, 28))
    assert bed.hooks.timed(forward, worker, extends, pp_proxy_tensors=None) == "result"
    (logged,) = bed.control.new_log().forwards
    assert logged.parts == [Part("a", 512, 100), Part("b", 0, 28)]
    assert 0.01 <= logged.seconds < 5


@pytest.mark.parametrize("other", [None, batch(("a", 512, 1), extend=False)])
def test_what_extends_nothing_is_not_logged(bed: Bed, other: Any):
    assert bed.hooks.timed(forward, SimpleNamespace(device="cpu"), batch=other) == "result"
    assert bed.control.new_log().forwards == ()


def test_forwards_on_a_gpu_are_logged_once_the_scheduler_is_idle(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
):
    gpu_s = 0.0
    waits: list[float] = []

    class Event:
        """Of a GPU whose clock is `gpu_s`."""

        at_s = 0.0

        def record(self) -> None:
            self.at_s = gpu_s

        def synchronize(self) -> None:
            waits.append(self.at_s)

        def elapsed_time(self, other: Event) -> float:
            return (other.at_s - self.at_s) * 1000

    def launch(*_: Any, **__: Any) -> None:
        nonlocal gpu_s
        gpu_s += 0.25

    monkeypatch.setattr(server_side, "_timing_event", Event)
    gpu = SimpleNamespace(device="cuda")
    bed.hooks.timed(launch, gpu, batch(("a", 0, 512)))
    bed.hooks.timed(launch, gpu, batch(("a", 512, 512)))
    assert (waits, bed.control.new_log().forwards) == ([], ())
    gpu_s += 2.0
    bed.want_eviction()
    now_s = time.perf_counter()
    for _ in range(2):
        bed.hooks.before_next_batch(bed.scheduler, running_batch=None)
    first, second = bed.control.new_log().forwards
    assert (first.parts, second.parts) == ([Part("a", 0, 512)], [Part("a", 512, 512)])
    assert (first.seconds, second.seconds) == (0.25, 0.25)
    assert second.at_s - first.at_s == pytest.approx(0.25)
    assert second.at_s + 2.25 == pytest.approx(now_s, abs=1)
    bed.want_eviction()
    bed.hooks.before_next_batch(bed.scheduler)
    assert bed.control.new_log().forwards == ()


def test_the_device_is_evicted_once_and_only_when_asked(bed: Bed):
    bed.hooks.before_next_batch(bed.scheduler)
    assert bed.evicted == []
    bed.want_eviction()
    for _ in range(3):
        bed.hooks.before_next_batch(bed.scheduler)
    assert (len(bed.evicted), bed.acknowledged()) == (1, 1)


def test_a_busy_scheduler_is_not_evicted(bed: Bed):
    bed.idle = False
    bed.want_eviction()
    bed.hooks.before_next_batch(bed.scheduler)
    assert (bed.evicted, bed.acknowledged()) == ([], 0)
    bed.idle = True
    bed.hooks.before_next_batch(bed.scheduler)
    assert bed.acknowledged() == 1


def test_what_is_still_being_written_to_the_host_is_waited_for(bed: Bed):
    bed.locked = 64
    bed.want_eviction()
    bed.hooks.before_next_batch(bed.scheduler)
    assert bed.acknowledged() == 0
    bed.locked = 0
    bed.hooks.before_next_batch(bed.scheduler)
    assert bed.acknowledged() == 1
