"""Figures and timelines."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.simulator.setup import Engine
from cacheflow_sgl.replay import ReplayError
from cacheflow_sgl.simulate.plot import plot_rows
from cacheflow_sgl.simulate.rows import Row, rows_of
from cacheflow_sgl.simulate.runs import Case, Run
from cacheflow_sgl.simulate.timeline import timeline
from cacheflow_sgl.simulate.workload import Prompts

from .stand import POLICIES, case, rows, short_trace

matplotlib = pytest.importorskip("matplotlib")
image = pytest.importorskip("matplotlib.image")


def drawn(tmp_path: Path, given: list[Row]) -> str:
    """The text of the figure."""
    plot_rows(given, tmp_path / "out.svg")
    return (tmp_path / "out.svg").read_text()


def lengths(batch: int) -> list[Case]:
    return [case(Prompts((length,) * batch, 64)) for length in (1024, 4096)]


@pytest.fixture(autouse=True)
def text_stays_text():
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        yield


def test_a_trace_is_a_distribution_a_link(tmp_path):
    text = drawn(tmp_path, rows(case(short_trace(40)), case(short_trace(40), gbps=40)))
    for piece in ("share of requests", "10 Gbps", "40 Gbps", "t.jsonl: 40 requests", *POLICIES):
        assert f"{piece}" in text
    assert "simulated on a modelled profile" in text


def test_lengths_are_the_x_axis_and_batches_are_panels(tmp_path):
    text = drawn(tmp_path, rows(*lengths(1), *lengths(4)))
    for piece in ("prefix tokens", ">1024<", ">4096<", "10 Gbps, 1 at once", "10 Gbps, 4 at once"):
        assert piece in text
    assert "simulated on a modelled profile" in text


@pytest.mark.parametrize(
    ("cases", "axis"),
    [
        ([case(gbps=10), case(gbps=40)], "link, Gbps"),
        ([case(Prompts((1024,) * n, 64)) for n in (1, 2)], "requests at once"),
        ([case()], "prefix tokens"),
    ],
)
def test_the_first_that_differs_is_the_x_axis(tmp_path, cases, axis):
    assert f">{axis}<" in drawn(tmp_path, rows(*cases, policies=POLICIES[:2]))


def test_many_panels_wrap_and_none_is_blank(tmp_path):
    links = [case(Prompts((n,), 64), gbps) for gbps in range(1, 6) for n in (512, 1024)]
    plot_rows(rows(*links, policies=POLICIES[-1:]), tmp_path / "out.png")
    picture = image.imread(tmp_path / "out.png")[..., :3]
    height, width, _ = picture.shape
    assert width < 2.5 * height
    red = (abs(picture - matplotlib.colors.to_rgb("#d55e00")) < 0.02).all(axis=-1)
    assert red[: height // 2, -width // 4 :].any(), "the line of the fourth panel"
    assert red[height // 2 : -height // 10, : width // 4].any(), "and of the fifth"
    assert not red[height // 2 : -height // 10, -width // 4 :].any(), "there is no eighth"


def test_an_engine_that_was_asked_for_has_its_own_line(tmp_path):
    run = Run(case(), BatchPolicyName.LONGEST, Engine.V1)
    assert "longest v1" in drawn(tmp_path, rows_of([(run, run.result())]))


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(ReplayError, match="cannot write the plot"):
        plot_rows(rows(case(), policies=POLICIES[:1]), tmp_path / "missing" / "out.png")


@pytest.mark.parametrize(
    ("policy", "stages"),
    [
        *((policy, 1) for policy in POLICIES),
        *((policy, 2) for policy in POLICIES if policy is not BatchPolicyName.CAKE),
    ],
)
def test_a_timeline_has_every_lane_and_all_its_work(stages, policy):
    result = Run(case(stages=stages), policy, record=True).result()
    events = json.loads(timeline(result, "a title"))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted(result.lanes)
    assert len(names) == 2 * stages
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [f"a title, stage {stage}" for stage in range(stages)]
    work = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            work[names[event["pid"], event["tid"]]].append(event)
            assert event["name"] == f"{event['cat']} of {event['args']['rid']}"
    for name, lane in result.lanes.items():
        assert len(work[name]) == len(lane.pieces)
        assert sum(e["dur"] for e in work[name]) == pytest.approx(
            lane.busy_s * 1e6, abs=len(work[name])
        )
        ordered = sorted(work[name], key=lambda event: event["ts"])
        for before, after in pairwise(ordered):
            assert before["ts"] + before["dur"] <= after["ts"], "a lane does one thing at a time"
    assert {e["cat"] for e in work["compute 0"]} <= {"prefix", "suffix"}
    assert bool(work["I/O 0.0"]) == (policy.value != "recompute")
