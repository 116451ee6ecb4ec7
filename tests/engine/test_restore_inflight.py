"""Restores while forwards are in flight, as they are on a GPU under the overlap schedule.

The forwards of a GPU's stream are emulated: see `tests/harness/plugin/in_flight.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import pytest

from tests.harness.prompts import PAGE, random_prompt
from tests.harness.restores import Answer, ask, body, checked, fill, post, set_rate
from tests.harness.servers import IN_FLIGHT, SharedServer, uses

pytestmark = pytest.mark.engine

CHUNK = 512
PROMPT = random_prompt(3 * CHUNK + PAGE, seed=71)


@pytest.fixture
def server(_server: SharedServer) -> Iterator[SharedServer]:
    """The shared server, checked for leaks and contradictions after the test."""
    with checked(_server) as server:
        yield server


def restore_behind_an_abort(
    server: SharedServer, policy: str, *, attempt: int, fence: bool
) -> Answer:
    """`PROMPT` restored into pages that a forward of an aborted request will still write to.

    The device has room for little more than one of them. A chunk of the other is in flight when it
    is aborted; `PROMPT`, which comes then, gets the pages of that chunk at once.
    """
    doomed = body(random_prompt(4 * CHUNK, seed=100 + attempt), rid="doomed")
    server.evict_device()
    server.faults.set(in_flight=True, fence=fence, chunk_delay_s=0.8)
    with ThreadPoolExecutor(2) as pool:
        aborted = pool.submit(post, server, "/generate", doomed)
        server.faults.wait_for(lambda state: state.chunked >= 2 * CHUNK)
        # Both come while the scheduler waits for the chunk before, and it sees both at once.
        answer = pool.submit(ask, server, PROMPT, policy)
        post(server, "/abort_request", {"rid": "doomed"})
        assert aborted.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
        return answer.result(60)


@uses(IN_FLIGHT)
@pytest.mark.parametrize("policy", ["split", "load"])
def test_loads_wait_for_forwards_that_still_write_to_their_pages(server, policy):
    (control,) = fill(server, PROMPT)
    for attempt in range(2):
        answer = restore_behind_an_abort(server, policy, attempt=attempt, fence=True)
        assert answer.report["loaded_tokens"] > 0
        assert answer.same_as(control)


@uses(IN_FLIGHT)
@pytest.mark.parametrize("policy", ["split", "load"])
def test_without_the_fence_they_would_be_overwritten(server, policy):
    """The test above can fail."""
    (control,) = fill(server, PROMPT)
    answers = (
        restore_behind_an_abort(server, policy, attempt=attempt, fence=False)
        for attempt in range(6)
    )
    assert not all(answer.same_as(control) for answer in answers)


@uses(IN_FLIGHT)
def test_claims_count_the_forward_in_flight(server):
    """The pointers then meet where they meet without one, and a chunk further up otherwise."""
    (control,) = fill(server, PROMPT)
    set_rate(server, 1000)

    def meeting(**faults: bool) -> float:
        server.faults.set(chunk_delay_s=0.4, **faults)
        meetings = []
        for _ in range(6):
            server.evict_device()
            answer = ask(server, PROMPT, "split")
            assert answer.same_as(control)
            meetings += answer.report["meetings"]
        return median(meetings[3:])  # the first have taught the costs

    alone = meeting(in_flight=False)
    counted = meeting(in_flight=True)
    not_counted = meeting(in_flight=True, in_flight_rule=False)
    print(alone, counted, not_counted)
    assert abs(counted - alone) <= CHUNK / 2
    assert not_counted >= counted + PAGE
