"""The published figures, and what the simulator says to them.

Conditions of most figures are only partly known, so each row states those that were assumed. They
were chosen among plausible ones; the cost profiles were fitted and committed before, and no row
changes them. `within` therefore says that such conditions exist, not that they were the paper's.
Beside it stands the figure under conditions common to all rows, and what moves it: the assumptions
are changed one at a time. "Ours" is `cacheflow` as it is here, by cells and shortest first, also in
the rows about v1; what v1's own rule gives is said where it differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random

import msgspec

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.bounds import meeting_point_bound
from cacheflow_sgl.core.profiles import TableCost
from cacheflow_sgl.core.roofline import (
    CALIBRATION_MODEL,
    GPUS,
    MODELS,
    Gpu,
    forward_s,
    modelled_profile,
)
from cacheflow_sgl.core.simulator.requests import Evicted, together
from cacheflow_sgl.core.simulator.result import Result
from cacheflow_sgl.core.simulator.setup import OWN_ENGINE, Boundary, Engine, Setup
from cacheflow_sgl.core.simulator.simulation import Simulation
from cacheflow_sgl.core.simulator.transfer import (
    CALL_S,
    NODE_BYTES_PER_S,
    TransferVariant,
    transfer_s,
)
from cacheflow_sgl.core.simulator.world import GBPS, Link, World
from cacheflow_sgl.core.thresholds import layer_threshold
from cacheflow_sgl.simulate.catalogue import named_profile
from cacheflow_sgl.simulate.runs import NETWORK_LATENCY_S

WITHIN = 0.15
"""Relative difference up to which a figure counts as reproduced."""
COMMON_PROFILE, COMMON_SUFFIX_TOKENS = "h100-qwen3-8b", 1024
_TRIALS = 8
"""Batches of mixed lengths that a figure is the mean of."""

_RECOMPUTE, _LOAD, _CAKE = BatchPolicyName.RECOMPUTE, BatchPolicyName.LOAD, BatchPolicyName.CAKE
_OURS = BatchPolicyName.CACHEFLOW


class PaperRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure beside the simulated one."""

    what: str
    grade: str
    """A: authors' text; S: seed documents; N: a reader's notes."""
    unit: str
    published: float
    simulated: float
    difference: float
    """Simulated over published, less one."""
    within: bool
    assumed: str
    """The conditions that were simulated."""
    common: float | None
    """Simulated under conditions common to all rows but for what the row is about."""
    why: str
    """What moves the figure, or why it does not come out."""


@dataclass(frozen=True)
class Conditions:
    """What is simulated. Prompt lengths are drawn log-uniformly from the two ends."""

    profile: str = "h100-qwen3-8b"
    gbps: float = 10.0
    prompt_tokens: tuple[int, int] = (8192, 8192)
    suffix_tokens: int = 256
    batch: int = 1
    engine: Engine = Engine.STAIRCASE
    stages: int = 1
    boundary: Boundary = Boundary.EXACT

    def __str__(self) -> str:
        low, high = self.prompt_tokens
        lengths = f"{low}" if low == high else f"{low} to {high}"
        parts = [self.profile, f"{self.gbps:g} Gbps", f"prompts of {lengths} tokens"]
        parts.append(f"{self.suffix_tokens} of them new")
        parts += [f"batch {self.batch}"] if self.batch > 1 else []
        parts += [f"{self.stages} stages, {self.boundary}"] if self.stages > 1 else []
        return ", ".join(parts)

    def common(self) -> Conditions:
        """The same on one H100 with Qwen3-8B and few new tokens, as every row can be."""
        return replace(self, profile=COMMON_PROFILE, suffix_tokens=COMMON_SUFFIX_TOKENS)

    def moved(self) -> Iterator[tuple[str, Conditions]]:
        """The same with one assumption changed, and that in words."""
        for factor in (0.5, 2.0):
            suffix = round(self.suffix_tokens * factor)
            yield f"{suffix} new tokens", replace(self, suffix_tokens=suffix)
            yield f"{self.gbps * factor:g} Gbps", replace(self, gbps=self.gbps * factor)
        model = self.profile.partition("-")[2]
        for gpu in ("l40s", "a100", "h100"):
            if not self.profile.startswith(gpu):
                yield gpu, replace(self, profile=f"{gpu}-{model}")


def simulated(conditions: Conditions, policy: BatchPolicyName, seed: int = 0) -> Result:
    """One run: a batch that arrives together, with exact beliefs."""
    _, profile = named_profile(conditions.profile)
    world = World.of(profile, [Link(NETWORK_LATENCY_S, conditions.gbps * GBPS)])
    setup = Setup(
        engine=OWN_ENGINE.get(policy, conditions.engine),
        policy=policy,
        stages=conditions.stages,
        boundary=conditions.boundary,
        layer_threshold=layer_threshold(
            world.compute,
            bandwidth_gbps=conditions.gbps,
            kv_bytes_per_token=world.kv_bytes_per_token,
            chunk=world.chunk,
        ),
        record=True,
    )
    low, high = (math.log(tokens) for tokens in conditions.prompt_tokens)
    draw = Random(seed)
    lengths = [
        round(math.exp(draw.uniform(low, high)) / world.chunk) * world.chunk
        for _ in range(conditions.batch)
    ]
    residency = Evicted(conditions.suffix_tokens, world.chunk)
    return Simulation(world, setup, together(lengths), residency).run()


# -- measures


def _ttft_s(policy: BatchPolicyName, conditions: Conditions) -> float:
    trials = _TRIALS if conditions.batch > 1 else 1
    return sum(simulated(conditions, policy, seed).mean_ttft_s for seed in range(trials)) / trials


def _speedup(over: Sequence[BatchPolicyName], conditions: Conditions) -> float:
    best_s = min(_ttft_s(policy, conditions) for policy in over)
    return best_s / _ttft_s(_OURS, conditions)


def _busy(policy: BatchPolicyName, lane: str, conditions: Conditions) -> float:
    result = simulated(conditions, policy)
    return result.lanes[lane].busy_share(0.0, result.end_s)


def _above_bound(conditions: Conditions) -> float:
    result = simulated(conditions, _OURS)
    _, profile = named_profile(conditions.profile)
    cost, chunk = TableCost(profile), profile.chunk
    prefix = conditions.prompt_tokens[0] - conditions.suffix_tokens
    chunks = [(chunk, cost.seconds(start, chunk)) for start in range(0, prefix, chunk)]
    per_token_s = profile.kv_bytes_per_token / (conditions.gbps * GBPS)
    return result.served[0].restored_s / meeting_point_bound(chunks, per_token_s).seconds - 1


def _crossover(conditions: Conditions) -> float:
    _, profile = named_profile(conditions.profile)
    return layer_threshold(
        TableCost(profile),
        bandwidth_gbps=conditions.gbps,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        chunk=profile.chunk,
    )


def _v1_rule(over: Sequence[BatchPolicyName], conditions: Conditions) -> str:
    v1 = replace(conditions, engine=Engine.V1)
    best_s = min(_ttft_s(policy, v1) for policy in over)
    ratio = best_s / _ttft_s(BatchPolicyName.LONGEST, v1)
    return f"With v1's own rule (I/O to the most work left, by tokens): {ratio:.3g}. "


def _down_the_pipe(conditions: Conditions) -> str:
    seconds = _ttft_s(_OURS, replace(conditions, boundary=Boundary.OFF))
    return f"With chunks that flow down the pipe (off): {seconds:.3g}. "


def _until_restored(policy: BatchPolicyName, lane: str, conditions: Conditions) -> str:
    result = simulated(conditions, policy)
    if policy is _RECOMPUTE:
        return ""
    share = result.lanes[lane].busy_share(0.0, result.served[0].restored_s)
    return f"Until the prefix is back, not the first token: {share:.3g}. "


# -- rows


@dataclass(frozen=True)
class _Figure:
    """A published figure and how to get at it."""

    what: str
    grade: str
    unit: str
    published: float
    conditions: Conditions
    measure: Callable[[Conditions], float]
    note: Callable[[Conditions], str] = lambda conditions: ""

    def row(self) -> PaperRow:
        """Simulate it, and what moves it."""
        value, assumed = self.measure(self.conditions), str(self.conditions)
        common = self.measure(self.conditions.common())
        moved = {words: self.measure(other) for words, other in self.conditions.moved()}
        moves = "; ".join(f"{words}: {_short(value)}" for words, value in moved.items())
        return _row(self, value, assumed, f"{self.note(self.conditions)}With {moves}", common)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _row(
    figure: _Figure | _Published,
    value: float,
    assumed: str,
    why: str,
    common: float | None = None,
) -> PaperRow:
    difference = value / figure.published - 1
    return PaperRow(
        what=figure.what,
        grade=figure.grade,
        unit=figure.unit,
        published=figure.published,
        simulated=value,
        difference=difference,
        within=abs(difference) <= WITHIN,
        assumed=assumed,
        common=common,
        why=why,
    )


_ALL_BASELINES = (_RECOMPUTE, _LOAD, _CAKE)
_V1_LENGTHS = Conditions(gbps=10.0, suffix_tokens=4096, engine=Engine.V1)
_MIXED = Conditions(prompt_tokens=(6144, 30720), batch=8)
_TWO_GPUS = Conditions(gbps=40.0, prompt_tokens=(10240, 10240), suffix_tokens=2048, stages=2)
_BUSY = Conditions(gbps=10.0, suffix_tokens=1024)
_LLAMA = Conditions(profile="h100-llama-3.1-8b", prompt_tokens=(32768, 32768))


def _figures() -> list[_Figure]:
    return [*_v1_figures(), *_v2_figures()]


def _v1_figures() -> list[_Figure]:
    over_recompute = partial(_speedup, (_RECOMPUTE,))
    over_best = partial(_speedup, _ALL_BASELINES)
    over_cake = partial(_speedup, (_CAKE,))
    batches = replace(_MIXED, profile="a100-qwen3-30b-a3b", gbps=80.0)
    serial = replace(_TWO_GPUS, boundary=Boundary.OFF_SERIAL)
    our_ttft_s = partial(_ttft_s, _OURS)
    figures = [
        _Figure(
            f"v1: {tokens // 1024}k tokens, over recompute", "S", "x", published,
            replace(_V1_LENGTHS, prompt_tokens=(tokens, tokens)), over_recompute,
        )
        for tokens, published in ((6144, 1.1), (30720, 1.7))
    ]  # fmt: skip
    figures += [
        _Figure(
            f"v1: {gbps} Gbps, over the best baseline", "S", "x", published,
            replace(_MIXED, gbps=float(gbps)), over_best, partial(_v1_rule, _ALL_BASELINES),
        )
        for gbps, published in ((40, 1.7), (80, 1.5))
    ]  # fmt: skip
    figures += [
        _Figure(
            f"v1: batch {batch}, over per-request scheduling", "S", "x", published,
            replace(batches, batch=batch), over_cake, partial(_v1_rule, (_CAKE,)),
        )
        for batch, published in ((2, 1.6), (8, 2.6))
    ]  # fmt: skip
    figures += [
        _Figure("v1: 2 GPUs, with boundary activations", "S", "s", 0.21, _TWO_GPUS, our_ttft_s),
        _Figure(
            "v1: 2 GPUs, without, one after the other",
            "S",
            "s",
            0.29,
            serial,
            our_ttft_s,
            _down_the_pipe,
        ),
    ]
    for policy, lane, published in (
        (_OURS, "compute 0", 0.88),
        (_OURS, "I/O 0.0", 0.78),
        (_LOAD, "compute 0", 0.10),
        (_RECOMPUTE, "compute 0", 0.91),
    ):
        conditions = replace(_BUSY, engine=Engine.V1)
        what = f"v1: {policy}, {lane.split()[0]} busy while restoring"
        measure = partial(_busy, policy, lane)
        note = partial(_until_restored, policy, lane)
        figures.append(_Figure(what, "S", "share", published, conditions, measure, note))
    return figures


def _v2_figures() -> list[_Figure]:
    over_cake = partial(_speedup, (_CAKE,))
    mixed = replace(_MIXED, profile="h100-llama-3.1-8b")
    figures = [
        _Figure("v2: token/layer crossover, Llama-3.1-8B", "N", "tokens", 36864, _LLAMA, _crossover)
    ]
    for at, published, conditions in (
        ("40 Gbps", 2.63, replace(mixed, gbps=40.0)),
        ("80 Gbps", 2.40, replace(mixed, gbps=80.0)),
        ("H100", 2.69, replace(mixed, gbps=40.0)),
        ("A100", 2.07, replace(mixed, gbps=40.0, profile="a100-llama-3.1-8b")),
    ):
        what = f"v2: over Cake, {at}"
        figures.append(_Figure(what, "N", "x", published, conditions, over_cake))
    for stages, published in ((1, 1.59), (2, 0.96), (4, 0.67)):
        conditions = replace(_LLAMA, stages=stages)
        measure = partial(_ttft_s, _OURS)
        figures.append(_Figure(f"v2: {stages} GPUs", "N", "s", published, conditions, measure))
    for tokens, published in ((32768, 0.0652), (131072, 0.0163)):
        conditions = replace(_LLAMA, prompt_tokens=(tokens + 512, tokens + 512), suffix_tokens=512)
        what = f"v2: above the bound, 10 Gbps, {tokens // 1024}k"
        figures.append(_Figure(what, "N", "share", published, conditions, _above_bound))
    return figures


@dataclass(frozen=True)
class _Published:
    """A published figure that is not a simulation of requests."""

    what: str
    grade: str
    unit: str
    published: float


def _range_rows() -> Iterator[PaperRow]:
    """v1's headline: the least and the most that TTFT falls over its whole grid."""
    grid = [
        replace(_MIXED, profile=f"{gpu}-{model}", gbps=gbps)
        for gpu, model, gbps in product(("l40s", "a100", "h100"), MODELS, (10.0, 40.0, 80.0))
    ]
    saved = {str(each): 1 - 1 / _speedup(_ALL_BASELINES, each) for each in grid}
    assumed = (
        "prompts of 6144 to 30720 tokens, 256 of them new, batch 8; "
        "3 GPUs x 3 models x 10, 40, 80 Gbps"
    )
    for what, published, pick in (("least", 0.10, min), ("most", 0.62, max)):
        place = pick(saved, key=saved.__getitem__)
        yield _row(
            _Published(f"v1: TTFT below the best baseline, {what}", "A", "share", published),
            saved[place],
            assumed,
            f"At {place}. Our baselines are at their best: the suffix follows loads layer by "
            "layer, and Cake's lanes never idle",
        )


def _cake_rows() -> Iterator[PaperRow]:
    """The points that the rooflines were fitted to."""
    for gpu, milliseconds in (("a100", (38.8, 112.0)), ("h100", (27.4, 93.5))):
        for index, published in zip((0, 63), milliseconds, strict=True):
            seconds = forward_s(
                GPUS[gpu], CALIBRATION_MODEL, 512 * index, 512, CALIBRATION_MODEL.layers
            )
            figure = _Published(f"Cake: chunk {index} of 512 tokens, {gpu}", "N", "ms", published)
            yield _row(figure, 1e3 * seconds, "0.5 MB of KV a token", "Calibration: fitted to it")


def _flowkv_rows() -> Iterator[PaperRow]:
    """KV of 12k tokens in one node."""
    llama = MODELS["llama-3.1-8b"]
    moved = partial(
        transfer_s,
        tokens=12000,
        layers=llama.layers,
        kv_bytes_per_token=llama.kv_bytes_per_token,
        link=NODE_BYTES_PER_S,
        call_s=CALL_S,
    )
    assumed = (
        f"Llama-3.1-8B, blocks of 16 tokens, {NODE_BYTES_PER_S / 1e9:g} GB/s, "
        f"{1e6 * CALL_S:.1f} us a call (from FlowKV's abstract)"
    )
    not_so = (
        "Not reproduced: the same bytes in 64 times fewer calls. It would take 2.8 ms a call, so "
        "something beside calls and bytes was measured, such as a copy between layouts"
    )
    for what, variant, published, why in (
        ("aligned", TransferVariant.ALIGNED, 0.0681, "23.1 GB/s would hit it"),
        ("per-block calls", TransferVariant.PER_BLOCK, 2.1894, "44 us a call would hit it"),
        ("block-major alone, at least", TransferVariant.BLOCK_MAJOR, 2.1894, not_so),
    ):
        figure = _Published(f"FlowKV: 12k tokens, {what}", "S", "s", published)
        yield _row(figure, moved(variant), assumed, why)


def _host_row() -> PaperRow:
    """Pinned host memory against a slow GPU."""
    like = GPUS["a100"]
    gpu = Gpu(
        name="NVIDIA H20",
        peak_flops=148e12,
        memory_bytes_per_s=4000e9,
        memory_gib=96,
        linear_fraction=like.linear_fraction,
        attention_fraction=like.attention_fraction,
        pcie_bytes_per_s=GPUS["h100"].pcie_bytes_per_s,
        calibration="A100's",
    )
    profile = modelled_profile(gpu, MODELS["qwen3-30b-a3b"], command="", date="", versions={})
    tokens, host = 32768, profile.tier("host")
    recompute_s = TableCost(profile).span_s(0, tokens, profile.chunk)
    load_s = host.latency_s + tokens * profile.kv_bytes_per_token / host.bytes_per_s
    figure = _Published("Pinned host memory over recompute, one H20, 30B-A3B", "N", "x", 56.0)
    return _row(
        figure,
        recompute_s / load_s,
        "32k tokens, roofline of an H20 with the A100's fractions of its peaks, PCIe 5",
        "Length: the ratio grows with it; and the fractions of the peak, which are guesses here",
    )


def paper_rows(progress: Callable[[int, int], None] = lambda done, of: None) -> list[PaperRow]:
    """Every figure of the table, in its order; takes some tens of seconds."""
    figures = _figures()
    groups: list[Callable[[], Sequence[PaperRow]]] = [lambda: list(_range_rows())]
    groups += [partial(lambda figure: [figure.row()], figure) for figure in figures]
    groups += [lambda: list(_cake_rows()), lambda: list(_flowkv_rows()), lambda: [_host_row()]]
    rows: list[PaperRow] = []
    for done, group in enumerate(groups):
        progress(done, len(groups))
        rows += group()
    progress(len(groups), len(groups))
    return rows
