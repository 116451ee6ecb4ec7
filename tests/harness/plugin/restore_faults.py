"""How a test breaks the restores of its server, and what the server tells of them.

One folder, three files, each with one writer: the test writes the faults, the server writes its
state whenever that changes, and adds a line to `broken` where two facts contradict each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cacheflow_sgl.files import write_atomically

DIRECTORY_VARIABLE = "CACHEFLOW_TEST_RESTORES"
"""Names the folder; without it a server has none of these hooks."""
IN_FLIGHT_VARIABLE = "CACHEFLOW_TEST_IN_FLIGHT"
"""Set, the server can leave forwards in flight; see `in_flight`."""


class Faults(msgspec.Struct, frozen=True):
    """What goes wrong, or is switched off.

    Attributes:
        fail_loads: so many loads from now on raise.
        load_delay_s: seconds that each load takes longer.
        fence: whether loads wait for the forwards before their slots were given.
        in_flight: whether chunks of a prompt but the last are left running behind the scheduler.
        in_flight_rule: whether compute claims count the forwards in flight.
        chunk_delay_s: seconds that such a chunk takes longer, before it writes.
        empty: how many times everything was to be evicted, on device and host.
    """

    fail_loads: int = 0
    load_delay_s: float = 0.0
    fence: bool = True
    in_flight: bool = False
    in_flight_rule: bool = True
    chunk_delay_s: float = 0.0
    empty: int = 0


class Progress(msgspec.Struct, frozen=True):
    """One restore at the start of a scheduler step; tokens as in `TwoPointers`."""

    admitted: bool
    position: int
    gap: int
    meeting: bool
    loaded_tokens: int


class State(msgspec.Struct, frozen=True):
    """The server at the start of a scheduler step.

    Attributes:
        emptied: the number of the last `Faults.empty` that is done.
        device_free: free device slots, in tokens.
        host_free: free host slots, in tokens.
        private: device slots that only restores own.
        running: requests that decode.
        chunked: tokens of SGLang's chunked request that forwards were launched for, 0 without one.
        restores: by request id.
    """

    emptied: int
    device_free: int
    host_free: int
    private: int
    running: int
    chunked: int
    restores: dict[str, Progress]


@dataclass
class TestEnd:
    """The test's end of the folder."""

    __test__ = False

    directory: Path
    _faults: Faults = field(default_factory=Faults)
    _stamp: int = field(default_factory=time.time_ns)

    def set(self, **faults: Any) -> None:
        """Have these faults from now on, and no others."""
        self._write(Faults(**faults, empty=self._faults.empty))

    def emptied(self, timeout_s: float = 60) -> State:
        """Have everything evicted from device and host once the server is idle; the state after."""
        number = self._faults.empty + 1
        self._write(msgspec.structs.replace(self._faults, empty=number))
        return self.wait_for(lambda state: state.emptied == number, timeout_s)

    def wait_for(self, condition: Callable[[State], bool], timeout_s: float = 60) -> State:
        """The first state seen that fulfils `condition`; TimeoutError with the last one."""
        deadline = time.monotonic() + timeout_s
        state = self.state()
        while state is None or not condition(state):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is still in {state}")
            time.sleep(0.002)
            state = self.state()
        return state

    def state(self) -> State | None:
        """The last state; None before the first step."""
        path = self.directory / "state"
        return msgspec.json.decode(path.read_bytes(), type=State) if path.exists() else None

    def broken(self) -> str:
        """What the server has found broken since its start; hopefully nothing."""
        path = self.directory / "broken"
        return path.read_text() if path.exists() else ""

    def _write(self, faults: Faults) -> None:
        self._faults = faults
        self._stamp += 1  # the clock of file systems is coarse
        fresh = self.directory / "faults.new"
        fresh.write_bytes(msgspec.json.encode(faults))
        os.utime(fresh, ns=(self._stamp, self._stamp))
        fresh.replace(self.directory / "faults")


@dataclass
class ServerEnd:
    """The server's end of the folder, and the hooks that follow it."""

    directory: Path
    _faults: Faults = field(default_factory=Faults)
    _stamp: int = 0
    _loads_to_fail: int = 0
    _told: State | None = None
    _emptied: int = 0

    @property
    def faults(self) -> Faults:
        """The faults as they are now; cheap where they have not changed."""
        path = self.directory / "faults"
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        if stamp != self._stamp:
            faults = msgspec.json.decode(path.read_bytes(), type=Faults)
            if faults.empty == self._faults.empty:
                self._loads_to_fail = faults.fail_loads
            self._stamp, self._faults = stamp, faults
        return self._faults

    def transfer(self, original: Callable[..., int], cache: Any, restore: Any, claim: Any) -> int:
        """Around `CacheFlowRadixCache._transfer`."""
        time.sleep(self.faults.load_delay_s)
        if self._loads_to_fail > 0:
            self._loads_to_fail -= 1
            raise OSError("a test has this load fail")
        return original(cache, restore, claim)

    def record_fence(self, original: Callable[..., Any], *streams: Any) -> Any:
        """Around `record_fence`."""
        return original(*streams) if self.faults.fence else ()

    def compute_in_flight_s(self, original: Callable[..., float], *args: Any) -> float:
        """Around `CacheFlowRadixCache._compute_in_flight_s`."""
        return original(*args) if self.faults.in_flight_rule else 0.0

    def after_events(self, _: None, cache: Any) -> None:
        """After `CacheFlowRadixCache.check_hicache_events`, once a step."""
        try:
            cache.check_integrity()
        except AssertionError as error:
            with (self.directory / "broken").open("a") as file:
                file.write(f"{error}\n")

    def before_batch(self, scheduler: Any, *_: Any, **__: Any) -> None:
        """Before `Scheduler.get_next_batch_to_run`, once a step."""
        wanted = self.faults.empty
        if wanted != self._emptied and scheduler.is_fully_idle():
            _empty(scheduler.tree_cache)
            self._emptied = wanted
        state = self._state(scheduler)
        if state != self._told:
            write_atomically(self.directory / "state", msgspec.json.encode(state))
            self._told = state

    def _state(self, scheduler: Any) -> State:
        cache = scheduler.tree_cache
        return State(
            emptied=self._emptied,
            device_free=cache.token_to_kv_pool_allocator.available_size(),
            host_free=cache.cache_controller.mem_pool_host.available_size(),
            private=cache.private_tokens,
            running=len(scheduler.running_batch.reqs),
            chunked=scheduler.chunked_req.extend_end if scheduler.chunked_req else 0,
            restores={rid: _progress(restore) for rid, restore in cache.restores.items()},
        )


def _progress(restore: Any) -> Progress:
    pointers = restore.pointers
    return Progress(
        admitted=restore.admitted,
        position=pointers.position,
        gap=pointers.gap,
        meeting=pointers.meeting,
        loaded_tokens=pointers.loaded_tokens,
    )


def _empty(cache: Any) -> None:
    """Evict all that is not locked or pinned."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache.evict(EvictParams(num_tokens=cache.evictable_size()))
    cache.evict_host(cache.cache_controller.mem_pool_host.size)


def register(directory: Path) -> None:
    """Register the hooks in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    end = ServerEnd(directory)
    cache = "cacheflow_sgl.engine.radix_cache.CacheFlowRadixCache"
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    for target, hook, kind in (
        (f"{cache}._transfer", end.transfer, HookType.AROUND),
        (f"{cache}._compute_in_flight_s", end.compute_in_flight_s, HookType.AROUND),
        ("cacheflow_sgl.engine.radix_cache.record_fence", end.record_fence, HookType.AROUND),
        (f"{cache}.check_hicache_events", end.after_events, HookType.AFTER),
        (f"{scheduler}.get_next_batch_to_run", end.before_batch, HookType.BEFORE),
    ):
        HookRegistry.register(target, hook, kind)
    if IN_FLIGHT_VARIABLE in os.environ:
        import in_flight

        in_flight.register(lambda: end.faults)
