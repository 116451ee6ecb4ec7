"""`profile measure`: start a server, and learn what its forwards, decode steps and loads cost."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from rich.console import Console

from cacheflow_sgl.bench.environment import Environment
from cacheflow_sgl.bench.options import RestoreOptions
from cacheflow_sgl.bench.prompts import random_tokens
from cacheflow_sgl.bench.protocol import BenchError, Control, Forward, Load, Log
from cacheflow_sgl.bench.requests import ask, read_answer
from cacheflow_sgl.bench.server import bench_server
from cacheflow_sgl.client import SglangClient, StreamEvent
from cacheflow_sgl.core.costs import MIN_ROWS, LinkCost
from cacheflow_sgl.core.geometry import page_ceil
from cacheflow_sgl.core.profiles import ComputeTable, Decode, Profile, Tier, with_thresholds
from cacheflow_sgl.progress import progress_bar

_Array = npt.NDArray[np.float64]
_DECODE_TOKENS = 33


@dataclass(frozen=True)
class ProfileOptions:
    """What `profile measure` measures; token counts are tokens.

    Attributes:
        model: directory or name; None is the tiny model, of this seed.
        longest: last start of a forward, at least a chunk.
        chunk: most rows of a forward, a multiple of `page`.
        page: tokens of a KV page.
        repeats: how often each prompt length is measured.
        seed: of prompts and weights.

    Raises:
        ValueError: a value is out of range; the message names the option.
    """

    model: str | None = None
    longest: int = 4096
    chunk: int = 512
    page: int = 64
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.page < 1 or self.chunk < MIN_ROWS or self.chunk % self.page:
            raise ValueError(
                f"--chunk is {self.chunk}; it must be a multiple of --page, {MIN_ROWS} or more"
            )
        if self.longest < self.chunk:
            raise ValueError(f"--longest is {self.longest}; it must be --chunk or more")
        if self.repeats < 1:
            raise ValueError("--repeats must be at least 1")

    @property
    def starts(self) -> tuple[int, ...]:
        """Where forwards are measured: 0, and chunk by chunk as it doubles up to `longest`."""
        doubled = (self.chunk << power for power in range(self.longest.bit_length()))
        return 0, *(start for start in doubled if start <= self.longest)

    @property
    def rows(self) -> tuple[int, ...]:
        """Of which sizes: whole pages as they double from `MIN_ROWS`, and a chunk."""
        least = page_ceil(MIN_ROWS, self.page)
        doubled = (least << power for power in range(self.chunk.bit_length()))
        return *(rows for rows in doubled if rows < self.chunk), self.chunk

    @property
    def requests(self) -> int:
        """How many requests it takes."""
        once = len(self.starts) * (len(self.rows) + 1) + 2
        return 1 + self.repeats * once


@dataclass(frozen=True)
class ModelShape:
    """What a profile tells of its model: layers, hidden width, and the type of weights and KV."""

    name: str
    layers: int
    hidden: int
    dtype: str
    value_bytes: int


@dataclass(frozen=True)
class Measured:
    """What a server was seen to take.

    Attributes:
        forwards: all that extended a single request.
        loads: each copy of a prefix from host to device.
        loaded_tokens: of all loads together.
        decode_s: (tokens of context, seconds of one decode step) for each step.
    """

    forwards: Sequence[Forward]
    loads: Sequence[Load]
    loaded_tokens: int
    decode_s: Sequence[tuple[int, float]]


def measure_profile(
    options: ProfileOptions, *, on_cpu: bool, console: Console | None = None
) -> Profile:
    """Measure a profile in a server of one's own, with progress on `console` (default stderr).

    Raises:
        BenchError: the server did not do what it was asked for.
        ServerError: it did not start, refused a request or broke off.
    """
    with (
        tempfile.TemporaryDirectory(prefix="cacheflow-profile-") as name,
        progress_bar(console or Console(stderr=True)) as progress,
    ):
        directory = Path(name)
        task = progress.add_task("starting the server", total=None)
        model = options.model or str(_tiny_model(directory, options.seed))
        shape = _shape(model, options)
        environment = Environment.now(shape.name, on_cpu=on_cpu)
        control = Control(directory / "settings.json")
        with bench_server(
            model, _server_options(options), directory, control.path, on_cpu=on_cpu
        ) as server:
            progress.update(task, description="requests", total=options.requests)
            prober = _Prober(server.client, control, options, lambda: progress.advance(task))
            return profile_of(prober.measure(), shape, options, environment)


class _Prober:
    """Sends the requests; a server that no one else uses."""

    def __init__(
        self,
        client: SglangClient,
        control: Control,
        options: ProfileOptions,
        on_request: Callable[[], None],
    ) -> None:
        self._client = client
        self._control = control
        self._options = options
        self._on_request = on_request
        self._source = Random(options.seed)
        self._numbers = count()
        self._forwards: list[Forward] = []
        self._loads: list[Load] = []
        self._loaded_tokens = 0
        self._decode_s: list[tuple[int, float]] = []

    def measure(self) -> Measured:
        """All requests, round by round, so that each cell sees the whole time of the run."""
        self._compute(self._options.longest)
        self._forwards.clear()  # the first request warms the server up
        for _ in range(self._options.repeats):
            for start in self._options.starts:
                for rows in self._options.rows:
                    prompt = self._compute(start + rows)
                self._load(prompt)
            for tokens in (self._options.page, self._options.longest):
                self._decode(tokens)
        return Measured(self._forwards, self._loads, self._loaded_tokens, self._decode_s)

    def _compute(self, tokens: int) -> list[int]:
        """Compute a prompt that no cache has."""
        prompt = random_tokens(tokens, self._source)
        ask(self._client, prompt, rid=self._rid())
        self._forwards += self._seen().forwards
        return prompt

    def _load(self, prompt: Sequence[int]) -> None:
        """Ask again for a prompt that is on the host only; SGLang's own load-back brings it."""
        answer = ask(self._client, prompt, rid=self._rid(), policy="sglang")
        loads = self._seen().loads
        if not loads or not answer.generation.cached.total:
            raise BenchError("the server did not load a prefix that its host should have")
        self._loads += loads
        self._loaded_tokens += answer.generation.cached.total

    def _decode(self, tokens: int) -> None:
        prompt = random_tokens(tokens, self._source)
        stream = self._client.stream(prompt, max_new_tokens=_DECODE_TOKENS, rid=self._rid())
        with stream:
            events = list(stream)
        read_answer(stream.sent_s, events)
        self._seen()
        self._decode_s += decode_steps(tokens, events)

    def _seen(self) -> Log:
        """Evict the device, so that the host has the only copy; what the server logged."""
        self._on_request()
        self._control.evict_device()
        return self._control.new_log()

    def _rid(self) -> str:
        return f"profile-{next(self._numbers)}"


def decode_steps(prompt_tokens: int, events: Iterable[StreamEvent]) -> list[tuple[int, float]]:
    """(tokens of context, seconds) of each step of one request; not of tokens that came at once."""
    with_token = [event for event in events if event.tokens]
    return [
        (prompt_tokens + before.tokens, after.at_s - before.at_s)
        for before, after in pairwise(with_token)
        if after.tokens == before.tokens + 1
    ]


def profile_of(
    measured: Measured, shape: ModelShape, options: ProfileOptions, environment: Environment
) -> Profile:
    """The profile that measurements make; `BenchError` where they leave a cell empty."""
    if not measured.loads:
        raise BenchError("no load was measured")
    profile = Profile(
        source="measured",
        hardware=environment.hardware,
        model=shape.name,
        dtype=shape.dtype,
        versions=environment.versions,
        command=" ".join(environment.command),
        date=environment.date,
        method=_method(options, environment),
        layers=shape.layers,
        kv_bytes_per_token=round(
            sum(load.nbytes for load in measured.loads) / measured.loaded_tokens
        ),
        boundary_bytes_per_token=2 * shape.hidden * shape.value_bytes,
        chunk=options.chunk,
        compute=_table(_samples(measured.forwards), shape.layers, options),
        decode=_decode_cost(measured.decode_s),
        tiers=(_host_tier(measured.loads),),
        layer_thresholds=(),
    )
    return with_thresholds(profile)


def _samples(forwards: Iterable[Forward]) -> dict[tuple[int, int], list[float]]:
    """Seconds of forwards of one request each, by start and rows."""
    samples: dict[tuple[int, int], list[float]] = defaultdict(list)
    for forward in forwards:
        if len(forward.parts) == 1:
            [part] = forward.parts
            samples[part.start, part.rows].append(forward.seconds)
    return samples


def _table(
    samples: Mapping[tuple[int, int], Sequence[float]], layers: int, options: ProfileOptions
) -> ComputeTable:
    missing = [
        (start, rows)
        for start in options.starts
        for rows in options.rows
        if (start, rows) not in samples
    ]
    if missing:
        start, rows = missing[0]
        raise BenchError(
            f"the server computed no forward of {rows} rows at {start}: "
            "are its chunks of another size?"
        )
    medians = np.array(
        [[np.median(samples[start, rows]) for rows in options.rows] for start in options.starts]
    )
    seconds = _in_order(medians)
    return ComputeTable(
        starts=options.starts,
        rows=options.rows,
        layers=(layers,),
        seconds=tuple(tuple((_rounded(cell),) for cell in row) for row in seconds),
    )


def _in_order(medians: _Array) -> _Array:
    """Halfway between the least rising table above them and the largest below.

    Medians of a busy machine may fall with start or rows, which no profile does.
    """
    above, below = medians, medians[::-1, ::-1]
    for axis in (0, 1):
        above = np.maximum.accumulate(above, axis)
        below = np.minimum.accumulate(below, axis)
    return np.asarray((above + below[::-1, ::-1]) / 2)


def _decode_cost(steps: Sequence[tuple[int, float]]) -> Decode:
    """The line through the median steps of the shorter and of the longer half of contexts."""
    middle = float(np.mean([tokens for tokens, _ in steps]))
    halves = [
        np.median([step for step in steps if (step[0] > middle) == long], axis=0)
        for long in (False, True)
    ]
    (few, short_s), (many, long_s) = halves
    slope = max(0.0, float((long_s - short_s) / (many - few)))
    base = float(short_s) - slope * float(few)
    return Decode(base_s=_rounded(base), per_context_token_s=_rounded(slope))


def _host_tier(loads: Sequence[Load]) -> Tier:
    link = LinkCost()
    for load in loads:
        link.observe(load.nbytes, load.seconds)
    return Tier(
        name="host", latency_s=_rounded(link.latency_s), bytes_per_s=_rounded(link.bytes_per_s)
    )


def _method(options: ProfileOptions, environment: Environment) -> str:
    return (
        f"Medians of {options.repeats} rounds in one SGLang server that answered nothing else: "
        "random prompts, each forward timed around the worker's call, through all layers; medians "
        "that fell with start or rows were brought together. Decode from the gaps between "
        "tokens of one request with a short and with a long context. Host tier from SGLang's own "
        "load-back of prefixes that had left the device, latency and rate fitted. "
        f"{environment.cpus} cores, shared with whatever else ran (load average "
        f"{environment.load_average[0]:.1f} at the start); without a GPU the server computes with "
        "one thread."
    )


def _shape(model: str, options: ProfileOptions) -> ModelShape:
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    dtype = config.dtype or torch.float32
    return ModelShape(
        name=options.model or f"tiny Qwen3, seed {options.seed}",
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        dtype=str(dtype).removeprefix("torch."),
        value_bytes=dtype.itemsize,
    )


def _server_options(options: ProfileOptions) -> RestoreOptions:
    longest = page_ceil(options.longest + options.chunk, options.page)
    return RestoreOptions(
        prefix_tokens=(longest,),
        suffix_tokens=1,
        chunk=options.chunk,
        page=options.page,
        seed=options.seed,
    )


def _tiny_model(directory: Path, seed: int) -> Path:
    from cacheflow_sgl.cpu.tiny_model import Recipe, write_tiny_model  # imports torch

    return write_tiny_model(directory / "model", Recipe(seed=seed))


def _rounded(value: float) -> float:
    """To 6 digits, so that files read well."""
    return float(f"{value:.6g}")
