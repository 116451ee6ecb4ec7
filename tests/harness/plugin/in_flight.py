"""Forwards in flight, on a CPU: what a GPU does by itself.

On a CPU a forward has ended when its call returns. Here, while `Faults.in_flight` is set, a forward
in the middle of a prompt runs in a thread of its own and the scheduler goes on at once, as beside a
GPU's stream; nothing of such a forward is needed but the KV that it writes. Events and streams are
replaced by ones that know what was given to the thread before them.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class Work:
    """A forward given to the thread."""

    def __init__(self) -> None:
        self.ended_s = 0.0
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None) -> None:
        self.ended_s, self._error = time.perf_counter(), error
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error


class Stream:
    """A stream: `last` is the last work that it was given or has to wait for, if any."""

    last: Work | None = None

    def __init__(self, priority: int = -1) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        self.last = other.last or self.last

    def wait_event(self, event: Event) -> None:
        self.last = event.after or self.last

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        if self.last is not None:
            self.last.wait()


class WriteBackStream(Stream):
    """Copies device to host of forwards whose result is there: they wait for nothing.

    Such a copy happens in the caller, who would wait for the forwards launched since as well.
    """

    def wait_stream(self, other: Stream) -> None:
        pass


class Event:
    """An event: it is reached when `after`, the last work its stream was given before, ends."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.after: Work | None = None
        self._recorded_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.after = (stream or current_stream()).last
        self._recorded_s = time.perf_counter()

    def query(self) -> bool:
        return self.after is None or self.after.has_ended

    def synchronize(self) -> None:
        if self.after is not None:
            self.after.wait()

    def wait(self, stream: Stream | None = None) -> None:
        """Have what follows on `stream` wait; it follows in the caller, so the caller waits."""
        (stream or current_stream()).synchronize()
        self.synchronize()

    def elapsed_time(self, stop: Event) -> float:
        """Milliseconds from this to `stop`; both have been reached."""
        return 1000 * (stop._reached_s - self._reached_s)

    @property
    def _reached_s(self) -> float:
        return max(self._recorded_s, self.after.ended_s if self.after else 0.0)


_local = threading.local()
_default = Stream()


def current_stream(device: Any = None) -> Stream:
    stream: Stream = getattr(_local, "stream", _default)
    return stream


class StreamContext:
    """Selects a stream, in this thread only."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._before = _default

    def __enter__(self) -> None:
        self._before = current_stream()
        _local.stream = self._stream or self._before

    def __exit__(self, *_: Any) -> None:
        _local.stream = self._before


class Forwards:
    """The forwards that are left running, one after the other."""

    def __init__(self, faults: Callable[[], Any]) -> None:
        self._faults = faults
        self._thread = ThreadPoolExecutor(1, "forward")
        self._in_middle = False
        self._last: Work | None = None

    def before_run_batch(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        """Before `Scheduler.run_batch`: a chunk alone, of which nothing is sampled?"""
        self._in_middle = (
            batch.forward_mode.is_extend()
            and scheduler.chunked_req is not None
            and batch.reqs == [scheduler.chunked_req]
        )

    def forward(
        self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kw: Any
    ) -> Any:
        """Around `ModelRunner.forward`."""
        faults, in_middle, self._in_middle = self._faults(), self._in_middle, False
        if not in_middle or not faults.in_flight:
            if self._last is not None:
                self._last.wait()
            if in_middle:
                time.sleep(faults.chunk_delay_s)
            return original(runner, batch, *args, **kw)
        context, work = contextvars.copy_context(), Work()

        def run() -> None:
            error = None
            try:
                with torch.inference_mode():
                    time.sleep(faults.chunk_delay_s)
                    context.run(original, runner, batch, *args, **kw)
            except BaseException as raised:
                error = raised
            work.end(error)

        self._thread.submit(run)
        self._last = current_stream().last = work
        return _nothing_sampled(runner, batch)


def _nothing_sampled(runner: Any, batch: Any) -> Any:
    """What stands for the output of a forward that nothing is sampled from."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput

    logits = torch.zeros(batch.batch_size, runner.model_config.vocab_size)
    return ModelRunnerOutput(LogitsProcessorOutput(next_token_logits=logits), can_run_graph=False)


def _after_engine_made(_: None, engine: Any, *__: Any) -> None:
    """After `L2TransferEngine.__init__`."""
    engine.device_to_host_stream = WriteBackStream()


def register(faults: Callable[[], Any]) -> None:
    """Replace events and streams in this process, and register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    torch.cpu.Stream = Stream  # type: ignore[misc,assignment]
    torch.cpu.Event = Event  # type: ignore[misc,assignment]
    torch.cpu.StreamContext = torch.cpu.stream = StreamContext  # type: ignore[misc,assignment]
    torch.cpu.current_stream = current_stream  # type: ignore[assignment]
    forwards = Forwards(faults)
    HookRegistry.register(
        "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.__init__",
        _after_engine_made,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.run_batch",
        forwards.before_run_batch,
        HookType.BEFORE,
    )
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        forwards.forward,
        HookType.AROUND,
    )
