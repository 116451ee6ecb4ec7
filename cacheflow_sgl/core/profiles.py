"""Cost profiles: what computing and loading cost on some hardware, in a file; and that as a cost.

A profile is JSON, read strictly: a wrong file is refused with one line that names the field. Its
compute table holds seconds of a forward over (start, rows, layers), the cost table of CacheFlow
(arXiv 2604.25080), measured by `cacheflow profile measure` or modelled by `core.roofline`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from cacheflow_sgl.core.thresholds import BANDWIDTHS_GBPS, layer_threshold

_Array = npt.NDArray[np.float64]
_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(gt=0)]
_SecondsOrNone = Annotated[float, Meta(ge=0)]

_MOST_LINES = 16384
"""Remembered pairs of rows and layers; a table asked for more forgets all and starts again."""
_MOST_SUMS = 1024
"""The same for sums over chunks, by offset, chunk and layers."""
_NUMBERS = re.compile(r"\[\n[\s\d.,eE+-]*\]")
"""A list of numbers that is spread over lines. In a JSON string no line ends."""


class ProfileError(ValueError):
    """A profile is wrong; the message is one line that names the file and the field."""


class ComputeTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one forward.

    Attributes:
        starts: offsets of its first token, ascending, 0 or more.
        rows: its tokens, ascending, positive.
        layers: how many layers it goes through, ascending, positive; the last is all.
        seconds: `seconds[start][rows][layers]`, positive, not decreasing along any axis.
    """

    starts: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    rows: Annotated[tuple[_Count, ...], Meta(min_length=1)]
    layers: Annotated[tuple[_Count, ...], Meta(min_length=1)]
    seconds: tuple[tuple[tuple[_Seconds, ...], ...], ...]


class Decode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one decode step of a batch: a base, and more for each token of context read."""

    base_s: _Seconds
    per_context_token_s: _SecondsOrNone


class Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link that KV is loaded over: seconds of a load are latency_s + bytes / bytes_per_s."""

    name: str
    latency_s: _SecondsOrNone
    bytes_per_s: Annotated[float, Meta(gt=0)]


class LayerThreshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """L_delta at a bandwidth.

    Attributes:
        bandwidth_gbps: 10^9 bits a second of the link.
        tokens: longest prefix, a multiple of the profile's chunk, that the layer-wise plan
            restores no later than the token-wise one; 0 where there is none.
    """

    bandwidth_gbps: Annotated[float, Meta(gt=0)]
    tokens: Annotated[int, Meta(ge=0)]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What computing and loading KV of one model costs on one kind of hardware.

    Attributes:
        format: version of this layout.
        source: whether the seconds were measured or come from a model.
        hardware: name of the accelerator or processor.
        model: name of the model.
        dtype: of weights and KV.
        versions: of the packages it was made with, by name.
        command: the command line that made it.
        date: when, ISO 8601.
        method: how, one paragraph.
        layers: of the model, up to 1024.
        kv_bytes_per_token: KV of one token, all layers.
        boundary_bytes_per_token: hidden state and residual of one token at a boundary of stages.
        chunk: tokens of a prefill forward that `layer_thresholds` stands for, 64 or more.
        compute: seconds of a forward.
        decode: seconds of a decode step.
        tiers: links that KV is loaded over; names are unique.
        layer_thresholds: follows from the rest: `derived_thresholds`.
    """

    format: Literal[1] = 1
    source: Literal["measured", "modelled"]
    hardware: str
    model: str
    dtype: str
    versions: dict[str, str]
    command: str
    date: str
    method: str
    layers: Annotated[int, Meta(ge=1, le=1024)]
    kv_bytes_per_token: _Count
    boundary_bytes_per_token: Annotated[int, Meta(ge=0)]
    chunk: Annotated[int, Meta(ge=64)] = 512
    compute: ComputeTable
    decode: Decode
    tiers: tuple[Tier, ...]
    layer_thresholds: tuple[LayerThreshold, ...]

    def tier(self, name: str) -> Tier:
        """The tier of this name; `KeyError` that lists the names where there is none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(f"no tier {name!r}; there are: {', '.join(t.name for t in self.tiers)}")


def load_profile(path: Path) -> Profile:
    """Read and check a profile.

    Raises:
        ProfileError: it cannot be read or is wrong.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from None
    return decode(data, name=str(path))


def decode(data: bytes, *, name: str = "profile") -> Profile:
    """Read and check the bytes of a profile that messages call `name`.

    Raises:
        ProfileError: it is wrong.
    """
    try:
        profile = msgspec.json.decode(data, type=Profile)
        check(profile)
    except msgspec.ValidationError as error:
        raise ProfileError(f"{name}: {error}") from None
    except msgspec.DecodeError as error:
        raise ProfileError(f"{name}: no JSON: {error}") from None
    except ProfileError as error:
        raise ProfileError(f"{name}: {error}") from None
    return profile


def encode(profile: Profile) -> bytes:
    """The bytes of a profile's file: one line a row of the table, so that changes read well."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=1).decode()
    return (_NUMBERS.sub(lambda found: "".join(found[0].split()), text) + "\n").encode()


def schema() -> bytes:
    """The JSON schema of a profile's file."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Profile)), indent=2) + b"\n"


def derived_thresholds(profile: Profile) -> tuple[LayerThreshold, ...]:
    """What `layer_thresholds` must be: L_delta at each of `BANDWIDTHS_GBPS`, from the costs."""
    cost = TableCost(profile)
    return tuple(
        LayerThreshold(
            bandwidth_gbps=gbps,
            tokens=layer_threshold(
                cost,
                bandwidth_gbps=gbps,
                kv_bytes_per_token=profile.kv_bytes_per_token,
                chunk=profile.chunk,
            ),
        )
        for gbps in BANDWIDTHS_GBPS
    )


def with_thresholds(profile: Profile) -> Profile:
    """The profile with its `layer_thresholds` derived anew from the rest."""
    return msgspec.structs.replace(profile, layer_thresholds=derived_thresholds(profile))


def check(profile: Profile) -> None:
    """Check what types can't say: order, shapes, and that `layer_thresholds` follow from the rest.

    Raises:
        ProfileError: the first thing that is wrong, with the path of its field.
    """
    _check_axes(profile.compute, profile.layers)
    _check_seconds(profile.compute)
    names = [tier.name for tier in profile.tiers]
    for at, name in enumerate(names):
        _require(names.index(name) == at, f"$.tiers[{at}].name", f"{name!r} is there twice")
    _check_thresholds(profile)


def _check_axes(table: ComputeTable, layers: int) -> None:
    for name in ("starts", "rows", "layers"):
        axis = getattr(table, name)
        for at, (before, value) in enumerate(pairwise(axis), start=1):
            _require(before < value, f"$.compute.{name}[{at}]", f"is {value}; the axis must ascend")
    _require(
        table.layers[-1] == layers,
        f"$.compute.layers[{len(table.layers) - 1}]",
        f"is {table.layers[-1]}; the axis must end at the model's {layers} layers",
    )


def _check_seconds(table: ComputeTable) -> None:
    path = "$.compute.seconds"
    _require_length(table.seconds, len(table.starts), path)
    for i, by_rows in enumerate(table.seconds):
        _require_length(by_rows, len(table.rows), f"{path}[{i}]")
        for j, by_layers in enumerate(by_rows):
            _require_length(by_layers, len(table.layers), f"{path}[{i}][{j}]")
    array = np.array(table.seconds)
    for dimension, name in enumerate(("start", "rows", "layers")):
        falls = np.argwhere(np.diff(array, axis=dimension) < 0)
        if len(falls):
            at = falls[0]
            at[dimension] += 1
            field = path + "".join(f"[{index}]" for index in at)
            raise ProfileError(f"{field} is below its neighbour of smaller {name}")


def _check_thresholds(profile: Profile) -> None:
    path, derived = "$.layer_thresholds", derived_thresholds(profile)
    _require_length(profile.layer_thresholds, len(derived), path)
    for at, (said, right) in enumerate(zip(profile.layer_thresholds, derived, strict=True)):
        _require(
            said == right,
            f"{path}[{at}]",
            f"says {said.tokens} tokens at {said.bandwidth_gbps:g} Gbps; the costs give "
            f"{right.tokens} at {right.bandwidth_gbps:g}",
        )


def _require(fine: bool, field: str, complaint: str) -> None:
    if not fine:
        raise ProfileError(f"{field} {complaint}")


def _require_length(values: Sequence[object], wanted: int, field: str) -> None:
    _require(len(values) == wanted, field, f"has {len(values)} entries; its axis has {wanted}")


class TableCost:
    """Seconds of a forward by a profile's table, between its entries multilinear.

    Beyond the last start or rows it goes on as between the last two, or steeper where otherwise
    more rows or layers would come to cost less. Before the first start it stays. Below the first
    rows or layers it goes to the base that the first two entries point at (nothing, where they
    point below it or there is one only). A forward of no rows or through no layers takes no time,
    every other one some, and never less than one that is smaller or starts earlier. Any thread may
    use it.
    """

    known = True
    """There is always something to stand on."""

    def __init__(self, profile: Profile) -> None:
        table = profile.compute
        self.layers = profile.layers
        """All layers of the model."""
        starts = np.array(table.starts, dtype=float)
        rows = np.array((0, *table.rows), dtype=float)
        self._layers = np.array((0, *table.layers), dtype=float)
        seconds = _with_base(np.array(table.seconds), rows, axis=1)
        seconds = _with_base(seconds, self._layers, axis=2)
        self._starts, seconds = _extended(starts, seconds, axis=0)
        self._rows, self._seconds = _extended(rows, seconds, axis=1)
        self._start_list: list[float] = self._starts.tolist()
        self._lines: dict[tuple[int, int | None], tuple[list[float], list[float]]] = {}
        self._sums: dict[tuple[int, int, int | None], list[float]] = {}

    def seconds(self, start: int, rows: int, layers: int | None = None) -> float:
        """Seconds of a forward of `rows` tokens at offset `start` through `layers` (None: all).

        `ValueError` where `rows` is negative or the model has not so many layers.
        """
        line = self._lines.get((rows, layers))
        if line is None:
            line = self._line(rows, layers)
        values, slopes = line
        at = bisect_right(self._start_list, start) - 1
        if at < 0:
            return values[0]
        return values[at] + slopes[at] * (start - self._start_list[at])

    def observe(self, start: int, rows: int, seconds: float) -> None:
        """Change nothing: a profile is given. `CorrectedCost` learns."""

    def span_s(self, start: int, stop: int, chunk: int, layers: int | None = None) -> float:
        """Seconds to compute tokens [start, stop) one chunk after the other, the last a rest.

        `chunk` is positive, and `stop` not below `start`.
        """
        first, offset = divmod(start, chunk)
        count, rest = divmod(stop - start, chunk)
        sums = self._sums.get((offset, chunk, layers))
        if sums is None or len(sums) <= first + count:
            sums = self._summed(offset, chunk, layers, first + count)
        whole = sums[first + count] - sums[first]
        return whole + self.seconds(stop - rest, rest, layers) if rest else whole

    def table(self, starts: npt.ArrayLike, rows: npt.ArrayLike, layers: npt.ArrayLike) -> _Array:
        """Seconds of forwards, element by element; the three broadcast against each other.

        `ValueError` as for `seconds`.
        """
        starts, rows = np.broadcast_arrays(np.asarray(starts, float), np.asarray(rows, float))
        by_start = self._by_start(rows)
        at, share = _place(self._starts, np.maximum(starts, self._starts[0]))
        at = at[..., None, None]
        low = np.take_along_axis(by_start, at, axis=-2)[..., 0, :]
        high = np.take_along_axis(by_start, at + 1, axis=-2)[..., 0, :]
        seconds = low + share[..., None] * (high - low)
        weights = self._layer_weights(np.asarray(layers, float))
        return np.asarray(np.einsum("...k,...k->...", seconds, weights))

    def _by_start(self, rows: _Array) -> _Array:
        """(*rows, starts, layers): seconds at the table's starts and layers."""
        if (rows < 0).any():
            raise ValueError("a forward has no less than 0 rows")
        at, share = _place(self._rows, rows)
        by_row = self._seconds.transpose(1, 0, 2)
        seconds = by_row[at] + share[..., None, None] * (by_row[at + 1] - by_row[at])
        # Beyond both the last rows and the last start lines would still cross.
        rise = np.diff(seconds[..., -2:, :], axis=-2)
        seconds[..., -1:, :] = seconds[..., -2:-1, :] + np.maximum.accumulate(rise, axis=-1)
        seconds[rows == 0] = 0.0
        return np.asarray(seconds)

    def _layer_weights(self, layers: _Array) -> _Array:
        """(*layers, table's layers): what each of the table's counts for each asked for."""
        if (layers < 0).any() or (layers > self.layers).any():
            raise ValueError(f"a forward goes through 0 to {self.layers} layers, no other number")
        at, share = _place(self._layers, layers)
        weights = np.zeros((*layers.shape, len(self._layers)))
        np.put_along_axis(weights, at[..., None], 1 - share[..., None], axis=-1)
        np.put_along_axis(weights, at[..., None] + 1, share[..., None], axis=-1)
        weights[layers == 0] = 0.0
        return weights

    def _line(self, rows: int, layers: int | None) -> tuple[list[float], list[float]]:
        """Values at the table's starts, and the slope behind each."""
        through = self.layers if layers is None else layers
        weights = self._layer_weights(np.array(through, float))
        values = self._by_start(np.array(rows, float)) @ weights
        slopes = np.diff(values) / np.diff(self._starts)
        line = values.tolist(), [*slopes.tolist(), float(slopes[-1])]
        if len(self._lines) >= _MOST_LINES:
            self._lines.clear()
        self._lines[rows, layers] = line
        return line

    def _summed(self, offset: int, chunk: int, layers: int | None, count: int) -> list[float]:
        """Sums of the seconds of the first 0, 1, ... chunks from `offset`; for `count` and more."""
        each = (self.seconds(offset + at * chunk, chunk, layers) for at in range(2 * count))
        sums = list(accumulate(each, initial=0.0))
        if len(self._sums) >= _MOST_SUMS:
            self._sums.clear()
        self._sums[offset, chunk, layers] = sums
        return sums


def _place(knots: _Array, values: _Array) -> tuple[npt.NDArray[np.intp], _Array]:
    """The interval of each value between ascending knots, and how far into it; may be over 1."""
    at = np.clip(np.searchsorted(knots, values, side="right") - 1, 0, len(knots) - 2)
    return at, (values - knots[at]) / (knots[at + 1] - knots[at])


def _with_base(seconds: _Array, knots: _Array, axis: int) -> _Array:
    """With entries for knot 0 put before the others of an axis: where the first two point at.

    They are no less for more of the other two axes, as the others are.
    """
    first = seconds.take([0], axis)
    base = np.zeros_like(first)
    if len(knots) > 2:
        slope = (seconds.take([1], axis) - first) / (knots[2] - knots[1])
        base = _rising(np.maximum(0.0, first - slope * knots[1]), axis)
    return np.concatenate([base, seconds], axis)


def _extended(knots: _Array, seconds: _Array, axis: int) -> tuple[_Array, _Array]:
    """With one knot more behind the others of an axis, from which on everything is a line.

    It rises as before it, and by no less for more of the other two axes, so lines never cross.
    """
    last = seconds.take([-1], axis)
    if len(knots) == 1:
        return np.append(knots, knots + 1), np.concatenate([seconds, last], axis)
    rise = _rising(last - seconds.take([-2], axis), axis)
    return np.append(knots, 2 * knots[-1] - knots[-2]), np.concatenate([seconds, last + rise], axis)


def _rising(values: _Array, axis: int) -> _Array:
    """Raised where they would fall along another axis than this."""
    for other in {0, 1, 2} - {axis}:
        values = np.maximum.accumulate(values, other)
    return values
