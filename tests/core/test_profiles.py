"""Profiles: what a file must hold, and the cost that its table makes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow_sgl.core.profiles import (
    ComputeTable,
    Decode,
    Profile,
    ProfileError,
    TableCost,
    Tier,
    decode,
    encode,
    load_profile,
    schema,
    with_thresholds,
)
from cacheflow_sgl.core.thresholds import BANDWIDTHS_GBPS

PROFILES = Path(__file__).parents[2] / "profiles"
FILES = sorted(path for path in PROFILES.glob("*.json") if path.name != "schema.json")

STARTS, ROWS, LAYERS = (0, 1000, 8000), (64, 256, 512), (4, 8)


def multilinear_s(start: float, rows: float, layers: float) -> float:
    """A forward that a multilinear table holds exactly, with bases along rows and layers."""
    return (0.1 + layers) * (0.001 + 1e-4 * rows) * (1 + start / 4000)


def profile(
    seconds: Callable[[int, int, int], float] = multilinear_s,
    *,
    starts: tuple[int, ...] = STARTS,
    rows: tuple[int, ...] = ROWS,
    layers: tuple[int, ...] = LAYERS,
) -> Profile:
    cells = tuple(
        tuple(tuple(seconds(start, count, depth) for depth in layers) for count in rows)
        for start in starts
    )
    return Profile(
        source="modelled",
        hardware="a GPU",
        model="a model",
        dtype="bfloat16",
        versions={},
        command="a command [ 1, 2 ]",
        date="2026-01-01",
        method="by hand",
        layers=layers[-1],
        kv_bytes_per_token=100_000,
        boundary_bytes_per_token=1000,
        compute=ComputeTable(starts=starts, rows=rows, layers=layers, seconds=cells),
        decode=Decode(base_s=0.01, per_context_token_s=1e-7),
        tiers=(Tier(name="host", latency_s=1e-5, bytes_per_s=2e10),),
        layer_thresholds=(),
    )


PROFILE = with_thresholds(profile())
COST = TableCost(PROFILE)


@st.composite
def tables(draw: st.DrawFn) -> Profile:
    """Any table that the format allows."""
    axes = [
        tuple(sorted(draw(st.sets(st.integers(least, most), min_size=1, max_size=3))))
        for least, most in ((0, 9000), (1, 600), (1, 9))
    ]
    shape = [len(axis) for axis in axes]
    steps = draw(st.lists(st.floats(0, 1), min_size=int(np.prod(shape)), max_size=27))
    cells = np.array(steps[: int(np.prod(shape))]).reshape(shape) + 1e-6
    for axis in range(3):
        cells = np.maximum.accumulate(cells, axis=axis)
    at = [{value: index for index, value in enumerate(axis)} for axis in axes]
    starts, rows, layers = axes
    return profile(
        lambda s, r, n: float(cells[at[0][s], at[1][r], at[2][n]]),
        starts=starts,
        rows=rows,
        layers=layers,
    )


def test_a_file_says_what_was_written():
    assert decode(encode(PROFILE)) == PROFILE


def test_a_row_of_the_table_is_one_line():
    lines = encode(PROFILE).decode().splitlines()
    assert '  "starts": [0,1000,8000],' in lines
    assert len(lines) < 80


def changed(*path: str | int, to: Any) -> bytes:
    content = json.loads(encode(PROFILE))
    at = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 2, "`$.format`"),
        (("source",), "guessed", "`$.source`"),
        (("colour",), "red", "unknown field `colour`"),
        (("compute", "colour"), "red", "unknown field `colour` - at `$.compute`"),
        (("method",), None, "`$.method`"),
        (("layers",), 0, "`$.layers`"),
        (("layers",), 5000, "`$.layers`"),
        (("kv_bytes_per_token",), 0, "`$.kv_bytes_per_token`"),
        (("boundary_bytes_per_token",), -1, "`$.boundary_bytes_per_token`"),
        (("chunk",), 1, "`$.chunk`"),
        (("compute", "starts"), [], "`$.compute.starts`"),
        (("compute", "starts", 0), -1, "`$.compute.starts[0]`"),
        (("compute", "starts", 1), 0, "$.compute.starts[1] is 0; the axis must ascend"),
        (("compute", "starts", 2), 900, "$.compute.starts[2] is 900; the axis must ascend"),
        (("compute", "rows", 0), 0, "`$.compute.rows[0]`"),
        (("compute", "rows", 1), 64, "$.compute.rows[1] is 64; the axis must ascend"),
        (("compute", "layers", 0), 0, "`$.compute.layers[0]`"),
        (("compute", "layers", 0), 9, "$.compute.layers[1] is 8; the axis must ascend"),
        (
            ("compute", "layers", 1),
            7,
            "$.compute.layers[1] is 7; the axis must end at the model's 8",
        ),
        (("compute", "seconds"), [], "$.compute.seconds has 0 entries; its axis has 3"),
        (("compute", "seconds", 1), [], "$.compute.seconds[1] has 0 entries; its axis has 3"),
        (("compute", "seconds", 1, 2), [1.0], "$.compute.seconds[1][2] has 1 entries; its axis"),
        (("compute", "seconds", 1, 2, 0), 0, "`$.compute.seconds[1][2][0]`"),
        (("compute", "seconds", 1, 2, 0), "1", "`$.compute.seconds[1][2][0]`"),
        (("compute", "seconds", 2, 0, 0), 0.01, "$.compute.seconds[2][0][0] is below its neigh"),
        (("compute", "seconds", 0, 1, 0), 0.03, "[0][1][0] is below its neighbour of smaller rows"),
        (("compute", "seconds", 0, 0, 1), 0.03, "[0][0][1] is below its neighbour of smaller lay"),
        (("decode", "base_s"), 0, "`$.decode.base_s`"),
        (("decode", "per_context_token_s"), -1, "`$.decode.per_context_token_s`"),
        (("tiers", 0, "latency_s"), -1, "`$.tiers[0].latency_s`"),
        (("tiers", 0, "bytes_per_s"), 0, "`$.tiers[0].bytes_per_s`"),
        (("layer_thresholds",), [], "$.layer_thresholds has 0 entries"),
        (("layer_thresholds", 2, "tokens"), 512, "$.layer_thresholds[2] says 512 tokens at 40"),
        (("layer_thresholds", 2, "bandwidth_gbps"), 41, "$.layer_thresholds[2] says"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(
    path: tuple[str | int, ...], value: Any, message: str
):
    with pytest.raises(ProfileError) as error:
        decode(changed(*path, to=value), name="p.json")
    assert str(error.value).startswith("p.json: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tier_that_is_there_twice_is_refused():
    tier = {"name": "host", "latency_s": 0, "bytes_per_s": 1}
    with pytest.raises(ProfileError, match=r"\$\.tiers\[1\]\.name 'host' is there twice"):
        decode(changed("tiers", to=[tier, tier]))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"format": 1}'])
def test_what_is_no_profile_is_refused(data: bytes):
    with pytest.raises(ProfileError, match=r"^p: "):
        decode(data, name="p")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_time_that_is_not_finite_is_refused(number: str):
    data = encode(PROFILE).replace(b'"base_s": 0.01', f'"base_s": {number}'.encode())
    assert data != encode(PROFILE)
    with pytest.raises(ProfileError):
        decode(data)


def test_a_file_is_named_where_it_cannot_be_read(tmp_path: Path):
    path = tmp_path / "p.json"
    with pytest.raises(ProfileError, match=rf"^{path}: cannot be read: No such file"):
        load_profile(path)
    path.write_bytes(changed("layers", to=9))
    with pytest.raises(ProfileError, match=rf"^{path}: \$\.compute\.layers"):
        load_profile(path)
    path.write_bytes(encode(PROFILE))
    assert load_profile(path) == PROFILE


def test_a_tier_is_found_by_its_name():
    assert PROFILE.tier("host").bytes_per_s == 2e10
    with pytest.raises(KeyError, match="no tier 'disk'; there are: host"):
        PROFILE.tier("disk")


def test_the_schema_is_up_to_date():
    assert (PROFILES / "schema.json").read_bytes() == schema(), "see profiles/README.md"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_profiles_of_this_repository_are_right(path: Path):
    loaded = load_profile(path)
    assert [each.bandwidth_gbps for each in loaded.layer_thresholds] == [*BANDWIDTHS_GBPS]
    assert "host" in {tier.name for tier in loaded.tiers}
    assert encode(loaded) == path.read_bytes()


def test_the_table_gives_its_own_entries():
    for start, rows, layers in itertools.product(STARTS, ROWS, LAYERS):
        assert COST.seconds(start, rows, layers) == pytest.approx(
            multilinear_s(start, rows, layers)
        )


@given(st.integers(0, 100_000), st.integers(1, 5000), st.integers(1, 8))
def test_between_and_beyond_its_entries_the_table_is_multilinear(start, rows, layers):
    expected = multilinear_s(start, rows, layers)
    assert COST.seconds(start, rows, layers) == pytest.approx(expected)
    if layers == 8:
        assert COST.seconds(start, rows) == COST.seconds(start, rows, 8)


def test_no_rows_and_no_layers_take_no_time():
    assert COST.seconds(1000, 0) == COST.seconds(1000, 64, 0) == 0.0
    assert not COST.table([[0], [1000]], [[0], [64]], [0]).any()


def test_a_forward_that_cannot_be_is_refused():
    for rows, layers in ((-1, 8), (64, -1), (64, 9)):
        with pytest.raises(ValueError, match="a forward"):
            COST.seconds(0, rows, layers)


def test_one_entry_is_taken_in_proportion():
    cost = TableCost(profile(lambda *_: 0.5, starts=(100,), rows=(512,), layers=(8,)))
    assert cost.seconds(0, 512) == cost.seconds(9999, 512) == pytest.approx(0.5)
    assert cost.seconds(0, 128, 4) == pytest.approx(0.5 / 8)
    assert cost.table(0, [1024], 8) == pytest.approx([1.0])


def test_a_base_below_nothing_is_none():
    """Rows of which the second half cost more than the first."""
    cost = TableCost(profile(lambda start, rows, layers: rows**2 * layers * 1e-6))
    small = [cost.seconds(0, rows) for rows in (1, 2, 4)]
    assert small == pytest.approx([small[0], 2 * small[0], 4 * small[0]])
    assert small[0] > 0


def test_lines_that_cross_beyond_the_table_do_not_fall():
    """The cost of rows shrinks with the start, which goes on to nothing beyond the rows."""
    seconds = {(0, 64): 1.0, (0, 512): 9.0, (1000, 64): 8.9, (1000, 512): 9.0}
    table = profile(
        lambda start, rows, layers: seconds[start, rows] * layers,
        starts=(0, 1000),
        rows=(64, 512),
        layers=(8,),
    )
    cost = TableCost(table)
    far = [cost.seconds(start, 4096) for start in (0, 500, 1000, 50_000)]
    assert far == sorted(far)
    assert far[0] > 0


def test_layers_do_not_cross_beyond_the_last_start_and_rows():
    cells = [[[1, 1], [1, 101]], [[51, 51], [51, 101]], [[51, 51], [101, 101]]]
    table = profile(
        lambda start, rows, layers: cells[start][rows - 1][layers - 1] / 100,
        starts=(0, 1, 2),
        rows=(1, 2),
        layers=(1, 2),
    )
    cost = TableCost(table)
    far = [cost.seconds(4, 3, layers) for layers in (1, 2)]
    assert far == sorted(far)
    assert cost.table(4, 3, [1, 2]) == pytest.approx(far)


points = st.tuples(st.integers(0, 20_000), st.integers(1, 2000), st.integers(1, 9))


@settings(deadline=None)
@given(tables(), st.lists(points, min_size=1, max_size=6))
def test_every_table_gives_positive_times_alike_one_by_one_and_all_at_once(table, wanted):
    cost = TableCost(table)
    wanted = [(start, rows, min(layers, table.layers)) for start, rows, layers in wanted]
    one_by_one = [cost.seconds(*point) for point in wanted]
    assert min(one_by_one) > 0
    assert np.isfinite(one_by_one).all()
    assert cost.table(*np.array(wanted).T) == pytest.approx(one_by_one)
    starts, rows = np.array(wanted)[:, :1], np.array(wanted)[:, 1:2]
    grid = cost.table(starts, rows, np.arange(table.layers + 1))
    assert (np.diff(grid, axis=1) >= -1e-9 * grid[:, 1:]).all()
    for (start, count, _), row in zip(wanted, grid, strict=True):
        each = [cost.seconds(start, count, layers) for layers in range(table.layers + 1)]
        assert row == pytest.approx(each)


@settings(deadline=None)
@given(tables(), points, points)
def test_more_of_anything_is_no_cheaper(table, point, more):
    cost = TableCost(table)
    start, rows, layers = point[0], point[1], min(point[2], table.layers)
    more_layers = min(layers + more[2], table.layers)
    base = cost.seconds(start, rows, layers) * (1 - 1e-9)
    assert cost.seconds(start + more[0], rows, layers) >= base
    assert cost.seconds(start, rows + more[1], layers) >= base
    assert cost.seconds(start, rows, more_layers) >= base


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30_000), st.integers(0, 9000), st.sampled_from([100, 512, 700])),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([None, 3, 8]),
)
def test_a_span_takes_as_long_as_its_chunks(spans, layers):
    cost = TableCost(PROFILE)
    for start, tokens, chunk in spans:
        stop = start + tokens
        each = [cost.seconds(at, min(chunk, stop - at), layers) for at in range(start, stop, chunk)]
        assert cost.span_s(start, stop, chunk, layers) == pytest.approx(sum(each))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cacheflow_sgl.core.profiles._MOST_LINES", 3)
    monkeypatch.setattr("cacheflow_sgl.core.profiles._MOST_SUMS", 3)
    cost = TableCost(PROFILE)
    for rows in range(1, 20):
        assert cost.seconds(0, rows) == COST.seconds(0, rows)
        assert cost.span_s(rows, 2000, 512) == COST.span_s(rows, 2000, 512)
        assert len(cost._lines) <= 3
        assert len(cost._sums) <= 3


def test_a_profile_is_not_changed_by_what_runs():
    before = COST.seconds(0, 512)
    COST.observe(0, 512, 99.0)
    assert COST.seconds(0, 512) == before
    assert COST.known


def test_the_types_say_what_the_schema_says():
    """`forbid_unknown_fields` and the least values are in the schema too."""
    definitions = msgspec.json.decode(schema())["$defs"]
    assert all(each["additionalProperties"] is False for each in definitions.values())
    assert definitions["Profile"]["properties"]["chunk"]["minimum"] == 64
