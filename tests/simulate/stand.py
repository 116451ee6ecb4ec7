"""Small simulations for the tests of what is around them."""

from cacheflow_sgl.core.batch import BatchPolicyName
from cacheflow_sgl.core.simulator.requests import Request
from cacheflow_sgl.core.simulator.setup import Boundary
from cacheflow_sgl.simulate.catalogue import named_profile
from cacheflow_sgl.simulate.rows import Row, rows_of
from cacheflow_sgl.simulate.runs import Case, NamedLink, Run, run_all
from cacheflow_sgl.simulate.workload import Prompts, Trace, Workload

NAME, PROFILE = named_profile("h100-qwen3-8b")
POLICIES = tuple(map(BatchPolicyName, ("recompute", "load", "cake", "cacheflow")))


def case(
    workload: Workload | None = None,
    gbps: float = 10,
    stages: int = 1,
    boundary: Boundary = Boundary.EXACT,
) -> Case:
    workload = workload or Prompts((2048,) * 2, 64)
    return Case(NAME, PROFILE, NamedLink.network(gbps), workload, stages, boundary)


def short_trace(requests: int, name: str = "t.jsonl") -> Trace:
    """Turns of 4 chats that grow by two blocks each time, more than the device holds."""
    turns = [
        Request(
            at, 0.05 * at, 1024 * (at // 4 % 8 + 1), 3, tuple(100 * (at % 4) + b for b in range(16))
        )
        for at in range(requests)
    ]
    return Trace(name, turns, 512, device_tokens=8192, tier_tokens=None)


def rows(*cases: Case, policies: tuple[BatchPolicyName, ...] = POLICIES) -> list[Row]:
    runs = [Run(each, policy) for each in cases for policy in policies]
    return rows_of((runs[at], result) for at, result in run_all(runs))
