import multiprocessing
from contextlib import nullcontext
from dataclasses import replace

import pytest

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.profiles import LayerThreshold
from cacheflow_sgl.core.simulator.setup import Boundary, Engine
from cacheflow_sgl.core.simulator.simulation import Simulation
from cacheflow_sgl.core.simulator.world import Link, World
from cacheflow_sgl.simulate import runs as module
from cacheflow_sgl.simulate.runs import ON_ONE_STAGE, NamedLink, Run, run_all, runs_of
from cacheflow_sgl.simulate.workload import Prompts

from .stand import POLICIES, PROFILE, case, short_trace


def test_a_tier_is_as_the_profile_says():
    disk = PROFILE.tier("disk")
    link = NamedLink.tier(PROFILE, "disk")
    assert link.name == "disk"
    assert link.latency_s == disk.latency_s
    assert link.gbps * 1e9 / 8 == pytest.approx(disk.bytes_per_s)
    with pytest.raises(KeyError, match="no tier 'tape'; there are: host, disk"):
        NamedLink.tier(PROFILE, "tape")


def test_a_faster_link_loads_sooner():
    slow, fast = (
        Run(case(gbps=gbps), BatchPolicyName.LOAD).result().mean_ttft_s for gbps in (10, 40)
    )
    assert fast < slow / 2


@pytest.mark.parametrize("policy", BatchPolicyName)
def test_only_policies_without_an_engine_take_the_one_asked_for(policy):
    run = Run(case(stages=2, boundary=Boundary.OFF), policy, Engine.V1, record=True)
    setup = run.setup()
    assert setup.engine is run.restored_by
    single = policy.value in ("recompute", "load", "cake")
    assert setup.engine == (policy.value if single else "v1")
    assert (setup.policy, setup.stages, setup.boundary) == (policy, 2, Boundary.OFF)
    assert setup.record
    assert (setup.layer_threshold > 0) == (not single)


def test_every_policy_runs_with_every_engine_but_its_own_once():
    policies = [BatchPolicyName.CAKE, BatchPolicyName.FIFO]
    cases, engines = [case(), case(gbps=40)], [Engine.LOAD, Engine.V1]
    found = runs_of(cases, policies, engines, record=True)
    assert [(run.case, run.policy, run.restored_by) for run in found] == [
        (each, policy, engine)
        for each in cases
        for policy, engine in (
            (BatchPolicyName.CAKE, Engine.CAKE),
            (BatchPolicyName.FIFO, Engine.LOAD),
            (BatchPolicyName.FIFO, Engine.V1),
        )
    ]
    assert all(run.record for run in found)


@pytest.mark.parametrize("engine", Engine)
def test_the_simulator_refuses_stages_to_the_same_engines(engine):
    setup = replace(Run(case(stages=2), BatchPolicyName.FIFO).setup(), engine=engine)
    world = World.of(PROFILE, [Link(0.0, 1e9)])
    with pytest.raises(ValueError) if engine in ON_ONE_STAGE else nullcontext():
        Simulation(world, setup, [], case().workload.residency(512))


def test_what_runs_at_once_fits_the_device_of_a_trace():
    policy = BatchPolicyName.FIFO
    assert Run(case(short_trace(8)), policy).setup().kv_tokens == 8192
    assert Run(case(), policy).setup().kv_tokens is None


@pytest.mark.parametrize("threshold", PROFILE.layer_thresholds, ids=str)
def test_l_delta_is_that_of_the_profile(threshold: LayerThreshold):
    assert case(gbps=threshold.bandwidth_gbps).layer_threshold() == threshold.tokens


def test_processes_find_what_one_finds():
    runs = [Run(case(short_trace(130)), policy) for policy in POLICIES]
    told: list[int] = []
    alone = dict(module._one_by_one(runs, told.append))
    assert told == sorted(told)
    assert told[-1] == 4 * 130
    shared: list[int] = []
    together = dict(module._in_processes(runs, 2, shared.append))
    assert {at: result.served for at, result in together.items()} == {
        at: result.served for at, result in alone.items()
    }
    assert shared == sorted(shared)
    assert shared[-1] <= 4 * 130
    assert multiprocessing.active_children() == []


def test_closing_ends_what_runs(monkeypatch):
    monkeypatch.setattr(module, "_FEW_TOKENS", 0)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    context = multiprocessing.get_context("spawn")
    served = context.Value("q", 0)
    monkeypatch.setattr(context, "Value", lambda *_: served)
    monkeypatch.setattr(module, "get_context", lambda _: context)
    runs = [Run(case(short_trace(size)), BatchPolicyName.LOAD) for size in (10, 4_000)]
    found = run_all(runs)
    assert next(found)[0] == 0
    assert multiprocessing.active_children() != []
    found.close()
    assert multiprocessing.active_children() == []
    assert served.value < 4_010


def test_few_tokens_start_no_process(monkeypatch):
    monkeypatch.setattr(module, "_in_processes", lambda *_: pytest.fail("not worth it"))
    runs = [Run(case(), policy) for policy in POLICIES]
    assert [at for at, _ in run_all(runs)] == [0, 1, 2, 3]


def test_the_blocks_of_a_trace_are_its_chunks():
    fine = replace(case(short_trace(8)), profile=PROFILE)
    assert fine.chunk == 512
    assert case(Prompts((2048,), 64)).chunk == PROFILE.chunk
