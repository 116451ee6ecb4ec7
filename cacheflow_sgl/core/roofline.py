"""Modelled seconds of a forward: a roofline, fitted to four public points and to nothing else.

A forward of `rows` tokens at offset `start` through `layers` of a model's L layers takes

    fixed
    + layers * max(linear flops / (peak * linear fraction),
                   weight bytes / (memory bandwidth * memory fraction))
    + layers * attention flops / (peak * attention fraction)

counted for one layer as follows.

- Linear flops: 2 for each row and each weight that it meets: the four projections of attention and
  three matrices of the MLP; of experts, the router and those that a row is sent to.
- Weight bytes: two for each weight that any row meets. Of experts, as many are read as `rows` rows
  touch when each picks its own at random: experts * (1 - (1 - active / experts) ** rows).
- Attention flops: 4 * heads * head_dim for each pair of a row and a token it sees (2 for the score,
  2 for the sum); row i of the forward sees start + i + 1 tokens, on average start + (rows + 1) / 2.

Launching the forward, embedding, norms, sampling and the output head (one row a forward) are in
`fixed`, whatever the number of layers.

The points are those that Cake (arXiv 2410.03065) reports for one 512-token chunk of a model with
0.5 MB of KV a token, at chunk 0 and at chunk 63. Per GPU they give the two fractions of flops. What
they don't tell is assumed, and the same for every GPU: `fixed` and the memory fraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cacheflow_sgl.core.profiles import ComputeTable, Decode, Profile, Tier, with_thresholds

_BYTES = 2
"""Of a weight, a KV value and an activation: bf16."""
_FIXED_S = 0.002
_MEMORY_FRACTION = 0.8
_PCIE_FRACTION = 0.8
_GEN4_X16, _GEN5_X16 = 31.5e9, 63.0e9
"""Bytes a second of a PCIe slot of 16 lanes, one way."""
_DECODE_ROWS = 8
"""Requests of the decode batch whose experts are read."""

_STARTS = (0, 4096, 16384, 32768, 65536, 131072)
_ROWS = (1, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, bf16.

    Attributes:
        name: as sold.
        peak_flops: dense flops a second, data sheet.
        memory_bytes_per_s: data sheet.
        memory_gib: data sheet.
        linear_fraction: share of the peak that matrix products of weights reach.
        attention_fraction: share of the peak that attention reaches.
        memory_fraction: share of the memory bandwidth that reading weights reaches.
        fixed_s: seconds of a forward that no rate explains, however few layers it goes through.
        pcie_bytes_per_s: of its slot, one way.
        calibration: where the two fractions of flops come from.
    """

    name: str
    peak_flops: float
    memory_bytes_per_s: float
    memory_gib: int
    linear_fraction: float
    attention_fraction: float
    memory_fraction: float = _MEMORY_FRACTION
    fixed_s: float = _FIXED_S
    pcie_bytes_per_s: float
    calibration: str


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of a transformer with grouped-query attention.

    Attributes:
        name: as published.
        layers: how many.
        hidden: width of the residual stream.
        intermediate: width of the MLP, or of one expert.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        vocab: entries of the output head.
        experts: of a layer; 1 for a dense model.
        active: experts that a row is sent to.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 1
    active: int = 1

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES

    @property
    def boundary_bytes_per_token(self) -> int:
        """Hidden state and residual of one token."""
        return 2 * self.hidden * _BYTES

    @property
    def weight_bytes(self) -> int:
        """All layers, and an embedding and an output head of `vocab` entries each."""
        weights = self._attention_weights + self.experts * self._expert_weights + self._router
        return _BYTES * (self.layers * weights + 2 * self.vocab * self.hidden)

    def linear_flops(self, rows: int) -> float:
        """Of one layer."""
        met = self._attention_weights + self.active * self._expert_weights + self._router
        return 2.0 * rows * met

    def read_bytes(self, rows: int) -> float:
        """Weights of one layer that `rows` rows meet; for experts the expectation."""
        touched = self.experts * (1 - (1 - self.active / self.experts) ** rows)
        return _BYTES * (self._attention_weights + touched * self._expert_weights + self._router)

    def attention_flops(self, start: int, rows: int) -> float:
        """Of one layer, for `rows` rows at offset `start`."""
        return 4.0 * self.heads * self.head_dim * rows * (start + (rows + 1) / 2)

    @property
    def _attention_weights(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def _expert_weights(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def _router(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0


_A100_FRACTIONS = {"linear_fraction": 0.587, "attention_fraction": 0.379}
_H100_FRACTIONS = {"linear_fraction": 0.27, "attention_fraction": 0.1325}

GPUS: Mapping[str, Gpu] = {
    "l40s": Gpu(
        name="NVIDIA L40S",
        peak_flops=362e12,
        memory_bytes_per_s=864e9,
        memory_gib=48,
        pcie_bytes_per_s=_GEN4_X16,
        calibration="taken from the A100, for want of a public point",
        **_A100_FRACTIONS,
    ),
    "a100": Gpu(
        name="NVIDIA A100 80GB SXM",
        peak_flops=312e12,
        memory_bytes_per_s=2039e9,
        memory_gib=80,
        pcie_bytes_per_s=_GEN4_X16,
        calibration="fitted to Cake's two points of the A100",
        **_A100_FRACTIONS,
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB SXM",
        peak_flops=989e12,
        memory_bytes_per_s=3350e9,
        memory_gib=80,
        pcie_bytes_per_s=_GEN5_X16,
        calibration="fitted to Cake's two points of the H100",
        **_H100_FRACTIONS,
    ),
    "h200": Gpu(
        name="NVIDIA H200 141GB SXM",
        peak_flops=989e12,
        memory_bytes_per_s=4800e9,
        memory_gib=141,
        pcie_bytes_per_s=_GEN5_X16,
        calibration="taken from the H100, for want of a public point",
        **_H100_FRACTIONS,
    ),
}
"""By the name that commands and files use."""

MODELS: Mapping[str, Model] = {
    "qwen3-8b": Model(
        name="Qwen3-8B",
        layers=36,
        hidden=4096,
        intermediate=12288,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=151936,
    ),
    "llama-3.1-8b": Model(
        name="Llama-3.1-8B",
        layers=32,
        hidden=4096,
        intermediate=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=128256,
    ),
    "qwen3-30b-a3b": Model(
        name="Qwen3-30B-A3B",
        layers=48,
        hidden=2048,
        intermediate=768,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        experts=128,
        active=8,
    ),
}
"""By the name that commands and files use."""

CALIBRATION_MODEL = Model(
    name="Llama-2-7B",
    layers=32,
    hidden=4096,
    intermediate=11008,
    heads=32,
    kv_heads=32,
    head_dim=128,
    vocab=32000,
)
"""What the public points are of: 0.5 MB of KV a token."""

CALIBRATION: Mapping[str, tuple[float, float]] = {
    "a100": (0.0388, 0.1120),
    "h100": (0.0274, 0.0935),
}
"""Seconds of chunk 0 and chunk 63 of 512 tokens of `CALIBRATION_MODEL` (arXiv 2410.03065)."""


def forward_s(gpu: Gpu, model: Model, start: int, rows: int, layers: int) -> float:
    """Seconds of a forward of `rows` tokens at offset `start` through `layers` layers."""
    flops_s = model.linear_flops(rows) / (gpu.peak_flops * gpu.linear_fraction)
    read_s = model.read_bytes(rows) / (gpu.memory_bytes_per_s * gpu.memory_fraction)
    attention = model.attention_flops(start, rows)
    attention_s = attention / (gpu.peak_flops * gpu.attention_fraction)
    return gpu.fixed_s + layers * (max(flops_s, read_s) + attention_s)


def decode_cost(gpu: Gpu, model: Model) -> Decode:
    """A decode step: `fixed`, all weights that 8 rows meet and the output head, the KV of all."""
    rate = gpu.memory_bytes_per_s * gpu.memory_fraction
    head_bytes = _BYTES * model.vocab * model.hidden
    weights_s = (model.layers * model.read_bytes(_DECODE_ROWS) + head_bytes) / rate
    return Decode(
        base_s=_rounded(gpu.fixed_s + weights_s),
        per_context_token_s=_rounded(model.kv_bytes_per_token / rate),
    )


def modelled_profile(
    gpu: Gpu, model: Model, *, command: str, date: str, versions: Mapping[str, str]
) -> Profile:
    """The profile of a model on a GPU; command, date and versions are taken as they are."""
    layers = (1, model.layers)
    seconds = tuple(
        tuple(
            tuple(_rounded(forward_s(gpu, model, start, rows, count)) for count in layers)
            for rows in _ROWS
        )
        for start in _STARTS
    )
    profile = Profile(
        source="modelled",
        hardware=gpu.name,
        model=model.name,
        dtype="bfloat16",
        versions=dict(versions),
        command=command,
        date=date,
        method=_method(gpu, model),
        layers=model.layers,
        kv_bytes_per_token=model.kv_bytes_per_token,
        boundary_bytes_per_token=model.boundary_bytes_per_token,
        compute=ComputeTable(starts=_STARTS, rows=_ROWS, layers=layers, seconds=seconds),
        decode=decode_cost(gpu, model),
        tiers=(
            Tier(name="host", latency_s=2e-5, bytes_per_s=gpu.pcie_bytes_per_s * _PCIE_FRACTION),
            Tier(name="disk", latency_s=1e-4, bytes_per_s=6e9),
            Tier(name="remote", latency_s=5e-5, bytes_per_s=12.5e9),
        ),
        layer_thresholds=(),
    )
    return with_thresholds(profile)


def _method(gpu: Gpu, model: Model) -> str:
    said = (
        "Roofline of cacheflow_sgl/core/roofline.py, nothing measured here. "
        f"Peak {gpu.peak_flops / 1e12:g} TFLOPS dense bf16, memory "
        f"{gpu.memory_bytes_per_s / 1e9:g} GB/s. Shares reached: linear {gpu.linear_fraction:g} "
        f"and attention {gpu.attention_fraction:g} ({gpu.calibration}, arXiv 2410.03065); "
        f"memory {gpu.memory_fraction:g}, and {gpu.fixed_s * 1e3:g} ms a forward (assumed). "
        f"Decode: weights that {_DECODE_ROWS} rows meet, and KV, at the memory's rate. "
        f"Tiers are assumed: host is PCIe at {gpu.pcie_bytes_per_s / 1e9:g} GB/s of which "
        f"{_PCIE_FRACTION:g} is reached, 20 us; disk one NVMe, 6 GB/s, 100 us; "
        "remote 100 Gbps, 50 us."
    )
    gib = model.weight_bytes / 2**30
    if gib > gpu.memory_gib:
        said += (
            f" The weights ({gib:.0f} GiB) don't fit the {gpu.memory_gib} GiB of one such GPU: "
            "the times are those of one that had room."
        )
    return said


def _rounded(seconds: float) -> float:
    """To 6 digits, so that files read well."""
    return float(f"{seconds:.6g}")
