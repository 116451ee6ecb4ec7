"""Restores from the host inside real servers: right answers, whatever happens meanwhile.

Every answer is compared with that of a cold run of the same server, token for token and logprob for
logprob; what was done is read from the restore report. After each test everything is evicted, and
device, host and pins must be as before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from tests.harness.equality import compare
from tests.harness.plugin.restore_faults import Progress, State
from tests.harness.prompts import PAGE, random_prompt
from tests.harness.reference import Reference
from tests.harness.restores import (
    NEW_TOKENS,
    Answer,
    ask,
    body,
    checked,
    fill,
    post,
    set_rate,
)
from tests.harness.servers import MATRIX, OUTSIDE, RESTORES, TIGHT, SharedServer, uses

pytestmark = pytest.mark.engine

CHUNK = 512
PREFIX = 3 * CHUNK
PROMPT = random_prompt(PREFIX + PAGE, seed=31)
BALANCED = 2500
"""Tokens per second of a link about as fast as compute."""
POLICIES = ("split", "load", "recompute", "cake", "cacheflow")


@pytest.fixture
def server(_server: SharedServer) -> Iterator[SharedServer]:
    """The shared server, checked for leaks and contradictions after the test."""
    with checked(_server) as server:
        yield server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests at the same time."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def add_up(answer: Answer, prefix: int = PREFIX) -> bool:
    """Whether the report accounts for every token of the prefix, and SGLang's counts agree."""
    report, cached = answer.report, answer.generation.cached
    spans = report["stop"] - report["start"]
    return (
        report["stop"] == prefix
        and report["outcome"] in ("restored", "recomputed")
        and report["computed_tokens"] + report["loaded_tokens"] == spans
        and (cached.device, cached.host) == (report["start"], report["loaded_tokens"])
    )


def wait_for_restore(
    server: SharedServer, rid: str, condition: Callable[[Progress], bool]
) -> Progress:
    """Wait until the restore of `rid` fulfils `condition`."""

    def seen(state: State) -> bool:
        return rid in state.restores and condition(state.restores[rid])

    return server.faults.wait_for(seen, 30).restores[rid]


def abort(server: SharedServer, rid: str) -> None:
    post(server, "/abort_request", {"rid": rid})


def ask_in_background(
    pool: ThreadPoolExecutor, server: SharedServer, policy: str, rid: str
) -> Future[dict[str, Any]]:
    """Send `PROMPT` under the name `rid`; SGLang's own JSON, since an abort lacks most of it."""
    return pool.submit(post, server, "/generate", body(PROMPT, policy, rid=rid))


def was_aborted(answer: Future[dict[str, Any]]) -> bool:
    return answer.result(60)["meta_info"]["finish_reason"]["type"] == "abort"


# -- every way, wherever the prefix lies


@uses(RESTORES, TIGHT)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_way_gives_the_answer_of_a_cold_run(server, policy):
    (control,) = fill(server, PROMPT)
    set_rate(server, BALANCED)
    answer = ask(server, PROMPT, policy)
    assert answer.same_as(control)
    assert add_up(answer)
    report = answer.report
    assert (report["policy"], report["failed_loads"]) == (policy, 0)
    if policy == "load":
        assert (report["way"], report["meetings"]) == ("load", [0])
    elif policy == "recompute":
        assert (report["way"], report["meetings"], report["outcome"]) == (
            "recompute",
            [],
            "recomputed",
        )
    elif policy in ("split", "cake"):
        assert report["way"] == "split"
        assert report["computed_tokens"] > 0
        assert report["loaded_tokens"] > 0


@uses(RESTORES)
def test_the_cold_run_says_what_the_model_says_without_sglang(server, tiny_model):
    (cold,) = fill(server, PROMPT)
    control = Reference(tiny_model).generate(PROMPT, max_new_tokens=NEW_TOKENS)
    assert compare([control], [cold.generation]).same


@uses(RESTORES)
def test_sglangs_own_way_is_told_as_that(server):
    (control,) = fill(server, PROMPT)
    answer = ask(server, PROMPT, "sglang")
    assert answer.same_as(control)
    assert answer.report == {"policy": "sglang", "way": "sglang", "reason": "policy"}
    assert answer.generation.cached.host == PREFIX


@uses(RESTORES)
@pytest.mark.parametrize("policy", ["split", "load"])
def test_spoiled_loads_are_seen(server, policy):
    """The comparison of all these tests can fail, and restored tokens are really used."""
    (control,) = fill(server, PROMPT)
    set_rate(server, BALANCED)
    with server.spoiled_loads():
        answer = ask(server, PROMPT, policy)
    assert answer.report["loaded_tokens"] > 0
    assert not answer.same_as(control)


@uses(RESTORES)
def test_the_meeting_moves_with_the_rate_of_the_link(server):
    (control,) = fill(server, PROMPT)
    meetings = []
    for rate in (500, 20_000):
        set_rate(server, rate)
        answer = ask(server, PROMPT, "split")
        assert answer.same_as(control)
        meetings += answer.report["meetings"]
        server.evict_device()
    slow, fast = meetings
    assert fast + 2 * PAGE <= slow


@uses(RESTORES)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_device_has_is_left_alone(server, policy):
    (control,) = fill(server, PROMPT)
    on_device = 640
    ask(server, PROMPT[:on_device], "recompute", tokens=1)
    set_rate(server, BALANCED)
    answer = ask(server, PROMPT, policy)
    assert answer.same_as(control)
    assert answer.report["start"] == on_device
    assert add_up(answer)


@uses(RESTORES)
@pytest.mark.parametrize("policy", ["split", "load"])
@pytest.mark.parametrize("suffix", [1, CHUNK + 3 * PAGE + 5])
def test_the_suffix_may_be_of_any_length(server, policy, suffix):
    prompt = random_prompt(PREFIX + suffix, seed=32)
    (control,) = fill(server, prompt)
    server.faults.emptied()
    fill(server, prompt[:PREFIX])
    set_rate(server, BALANCED)
    answer = ask(server, prompt, policy)
    assert answer.same_as(control)
    assert add_up(answer)


# -- kinds of request


@uses(RESTORES)
@pytest.mark.parametrize("policy", ["split", "load"])
def test_a_streamed_answer(server, policy):
    (control,) = fill(server, PROMPT)
    set_rate(server, BALANCED)
    events = list(
        server.client.stream(
            PROMPT,
            max_new_tokens=NEW_TOKENS,
            logprobs=True,
            custom_params={"cacheflow_restore": policy},
        )
    )
    assert [event.tokens for event in events] == sorted({event.tokens for event in events})
    answer = Answer.of(events[-1].answer)
    assert answer.same_as(control)
    assert add_up(answer)


@uses(RESTORES)
@pytest.mark.parametrize("policy", ["split", "load"])
def test_logprobs_of_the_prompt_from_its_middle(server, policy):
    begin = 1000
    (control,) = fill(server, PROMPT, logprob_start_len=begin)
    set_rate(server, BALANCED)
    answer = ask(server, PROMPT, policy, logprob_start_len=begin)
    assert answer.same_as(control)
    assert add_up(answer, begin // PAGE * PAGE)
    got, expected = (a.meta["input_token_logprobs"] for a in (answer, control))
    assert [token for _, token, *_ in got] == [token for _, token, *_ in expected]
    pairs = list(zip(got, expected, strict=True))[1:]  # the first has no logprob
    assert len(pairs) == len(PROMPT) - begin - 1
    assert max(abs(a[0] - b[0]) for a, b in pairs) < 1e-3


@uses(RESTORES)
def test_two_samples_of_one_prompt(server):
    (control,) = fill(server, PROMPT)
    set_rate(server, BALANCED)
    content = body(PROMPT, "split", sampling={"n": 2})
    answers = [Answer.of(answer) for answer in post(server, "/generate", content)]
    assert len(answers) == 2
    assert all(answer.same_as(control) for answer in answers)


@uses(RESTORES)
@pytest.mark.parametrize("policy", ["split", "load"])
def test_an_answer_by_a_grammar(server, policy):
    grammar = {"regex": "[0-9]{4}", "ignore_eos": False}
    (control,) = fill(server, PROMPT, sampling=grammar)
    assert control.generation.text.isdigit()
    set_rate(server, BALANCED)
    answer = ask(server, PROMPT, policy, sampling=grammar)
    assert answer.same_as(control)
    assert answer.generation.text == control.generation.text


# -- several at once


@uses(RESTORES)
@pytest.mark.parametrize("policies", [("split", "split"), ("load", "split", "load", "cacheflow")])
def test_several_prefixes_at_once(server, pool, policies):
    prompts = [random_prompt(2 * CHUNK + PAGE, seed=40 + n) for n in range(len(policies))]
    controls = fill(server, *prompts)
    set_rate(server, BALANCED)
    answers = list(pool.map(lambda p, policy: ask(server, p, policy), prompts, policies))
    for answer, control in zip(answers, controls, strict=True):
        assert answer.same_as(control)
    assert sum(answer.report.get("loaded_tokens", 0) for answer in answers) > 0


@uses(RESTORES)
@pytest.mark.parametrize("policies", [("split", "split"), ("load", "load"), ("load", "split")])
def test_the_same_prefix_at_once(server, pool, policies):
    (control,) = fill(server, PROMPT)
    set_rate(server, BALANCED)
    answers = list(pool.map(lambda policy: ask(server, PROMPT, policy), policies))
    assert all(answer.same_as(control) for answer in answers)


@uses(RESTORES)
@pytest.mark.parametrize("policy", ["split", "load"])
def test_beside_a_running_decode(server, pool, policy):
    beside = random_prompt(100, seed=33)
    (control,) = fill(server, PROMPT)
    (long_control,) = fill(server, beside, tokens=60)
    set_rate(server, BALANCED)
    long = pool.submit(ask, server, beside, tokens=60)
    server.faults.wait_for(lambda state: state.running == 1)
    answer = ask(server, PROMPT, policy)
    assert answer.same_as(control)
    assert add_up(answer)
    assert long.result(60).same_as(long_control)


@uses(TIGHT)
@pytest.mark.parametrize("policy", ["split", "load", "recompute"])
def test_requests_that_do_not_fit_together(server, pool, policy):
    """The device has room for one prefix and a little more."""
    prompts = [random_prompt(2 * CHUNK + 4 * PAGE + 9, seed=50 + n) for n in range(4)]
    controls = fill(server, *prompts)
    set_rate(server, 2 * BALANCED)
    answers = list(pool.map(lambda prompt: ask(server, prompt, policy), prompts))
    for answer, control in zip(answers, controls, strict=True):
        assert answer.same_as(control)


@uses(TIGHT)
def test_a_request_that_is_preempted_starts_again(server, pool):
    """The server runs two at a time."""
    *low, high = (random_prompt(CHUNK + PAGE, seed=60 + n) for n in range(3))
    controls = fill(server, *low, tokens=120) + fill(server, high)
    set_rate(server, 2 * BALANCED)
    answers = [pool.submit(ask, server, prompt, "split", tokens=120, priority=0) for prompt in low]
    server.faults.wait_for(lambda state: state.running == 2)
    answers.append(pool.submit(ask, server, high, "split", priority=100))
    for answer, control in zip(answers, controls, strict=True):
        assert answer.result(60).same_as(control)
    assert sum(answer.result().meta["num_retractions"] for answer in answers) == 1


# -- ends before the end


@uses(RESTORES, TIGHT)
@pytest.mark.parametrize("moment", ["queued", "chunking", "meeting"])
def test_an_abort_gives_everything_back(server, pool, moment):
    (control,) = fill(server, PROMPT)
    set_rate(server, 300)
    # Whole chunks in both lanes: compute is at the load in flight long before that ends.
    policy = {"queued": "load", "chunking": "split", "meeting": "cake"}[moment]
    conditions: dict[str, Callable[[Progress], bool]] = {
        "queued": lambda progress: not progress.admitted,
        "chunking": lambda progress: progress.position >= CHUNK // 2 and progress.gap > 0,
        "meeting": lambda progress: progress.meeting,
    }
    answer = ask_in_background(pool, server, policy, "doomed")
    wait_for_restore(server, "doomed", conditions[moment])
    abort(server, "doomed")
    assert was_aborted(answer)
    set_rate(server, BALANCED)
    server.evict_device()
    again = ask(server, PROMPT, "split")
    assert again.same_as(control)


@uses(RESTORES)
@pytest.mark.parametrize("policy", ["split", "load"])
def test_a_client_that_hangs_up(server, policy):
    (control,) = fill(server, PROMPT)
    set_rate(server, 300)
    stream = server.client.stream(PROMPT, rid="gone", custom_params={"cacheflow_restore": policy})
    wait_for_restore(server, "gone", lambda progress: True)
    stream.close()
    server.faults.wait_for(lambda state: "gone" not in state.restores)
    set_rate(server, None)
    server.evict_device()
    assert ask(server, PROMPT, policy).same_as(control)


@uses(RESTORES)
def test_a_flush_after_an_abort_leaves_nothing(server, pool):
    (control,) = fill(server, PROMPT)
    set_rate(server, 300)
    rids = ("doomed-a", "doomed-b")
    answers = [ask_in_background(pool, server, "load", rid) for rid in rids]
    server.faults.wait_for(lambda state: len(state.restores) == 2)
    for rid in rids:
        abort(server, rid)
    server.client.flush_cache()
    assert all(was_aborted(answer) for answer in answers)
    set_rate(server, None)
    cold = ask(server, PROMPT, "split")
    assert cold.generation.cached.total == 0
    assert cold.same_as(control)


@uses(RESTORES, TIGHT)
@pytest.mark.parametrize("policy", ["split", "load"])
def test_pausing_retracts_a_restore_and_it_begins_again(server, pool, policy):
    (control,) = fill(server, PROMPT)
    set_rate(server, 600)
    answer = pool.submit(ask, server, PROMPT, policy, rid="paused")
    wait_for_restore(server, "paused", lambda progress: True)
    post(server, "/pause_generation", {"mode": "retract"})
    post(server, "/continue_generation", {})
    set_rate(server, None)
    assert answer.result(60).same_as(control)


# -- loads that fail or are late


@uses(RESTORES, TIGHT)
@pytest.mark.parametrize("policy", ["split", "load", "cake"])
def test_a_load_that_fails_is_recomputed(server, policy):
    (control,) = fill(server, PROMPT)
    set_rate(server, BALANCED)
    server.faults.set(fail_loads=1)
    answer = ask(server, PROMPT, policy)
    assert answer.same_as(control)
    if policy != "load":  # which starts again as a recompute
        assert add_up(answer)
        assert answer.report["failed_loads"] == 1
        assert answer.report["failed_tokens"] > 0


@uses(RESTORES)
@pytest.mark.parametrize("policy", ["split", "load"])
def test_loads_that_all_fail_are_given_up(server, policy):
    (control,) = fill(server, PROMPT)
    server.faults.set(fail_loads=1_000_000)
    answer = ask(server, PROMPT, policy)
    assert answer.same_as(control)
    assert answer.report["outcome"] == "recomputed"
    assert answer.report["failed_loads"] <= 3
    assert answer.generation.cached.total == 0


def teach(server: SharedServer, prompt: Sequence[int], rate: float | None, times: int = 3) -> None:
    """Have the server learn both costs while the link has this rate."""
    set_rate(server, rate)
    for _ in range(times):
        ask(server, prompt, "split")
        server.evict_device()


@uses(RESTORES)
def test_a_late_load_starts_compute(server):
    (control,) = fill(server, PROMPT)
    teach(server, PROMPT, 20_000)
    server.faults.set(load_delay_s=1.5)
    answer = ask(server, PROMPT, "load")
    assert answer.same_as(control)
    assert add_up(answer)
    assert answer.report["way"] == "load"
    assert answer.report["late"]
    assert answer.report["computed_tokens"] > 0


# -- choices


@uses(RESTORES)
def test_the_choice_follows_the_link(server):
    """Also back from a link so slow that nothing was loaded any more: a page now and then is."""
    prompt = random_prompt(2 * CHUNK + PAGE, seed=34)
    (control,) = fill(server, prompt)

    def chosen() -> str:
        answer = ask(server, prompt)
        assert answer.same_as(control)
        server.evict_device()
        way: str = answer.report["way"]
        return way

    def becomes(way: str, tries: int) -> bool:
        return any(chosen() == way for _ in range(tries))

    teach(server, prompt, 200_000)
    assert becomes("load", 3)
    set_rate(server, 200)
    assert becomes("recompute", 10)
    set_rate(server, 200_000)
    assert becomes("load", 60)


# -- what is told


@uses(RESTORES)
def test_metrics_agree_with_the_reports(server):
    def series() -> dict[str, float]:
        metrics = server.client.metrics()
        totals = {
            way: metrics.total("cacheflow:restored_tokens_total", way=way)
            for way in ("computed", "loaded")
        }
        for way, outcome in (("split", "restored"), ("load", "restored")):
            labels = {"way": way, "outcome": outcome}
            totals[way] = metrics.total("cacheflow:restores_total", **labels)
        totals["policy"] = metrics.total("cacheflow:restore_fallbacks_total", reason="policy")
        totals["failed"] = metrics.total("cacheflow:restore_failed_loads_total")
        totals["overlap"] = metrics.total("cacheflow:restore_overlap_seconds_total")
        totals["seconds"] = metrics.total("cacheflow:restore_seconds_count")
        return totals

    fill(server, PROMPT)
    set_rate(server, BALANCED)
    before = series()
    reports = []
    for policy in ("split", "load", "sglang"):
        reports.append(ask(server, PROMPT, policy).report)
        server.evict_device()
    server.faults.set(fail_loads=1)
    reports.append(ask(server, PROMPT, "split").report)
    grown = {name: value - before[name] for name, value in series().items()}
    told = [report for report in reports if "stop" in report]
    assert grown == {
        "computed": sum(report["computed_tokens"] for report in told),
        "loaded": sum(report["loaded_tokens"] for report in told),
        "split": 2,
        "load": 1,
        "policy": 1,
        "failed": 1,
        "overlap": pytest.approx(sum(report["overlap_s"] for report in told), abs=1e-4),
        "seconds": 3,
    }


@uses(RESTORES)
def test_detached_it_leaves_restores_to_sglang_and_attached_it_traces_them(server, tmp_path):
    (control,) = fill(server, PROMPT)
    server.client.detach_storage()
    try:
        answer = ask(server, PROMPT, "split")
        assert answer.same_as(control)
        assert answer.report.get("way", "sglang") == "sglang"
        assert answer.generation.cached.host == PREFIX
        server.evict_device()
        trace = tmp_path / "trace.json"
        options = server.storage_options | {"restore_trace": str(trace)}
        server.client.attach_storage("cacheflow", options=options)
        set_rate(server, BALANCED)
        answer = ask(server, PROMPT, "split")
        assert answer.same_as(control)
        assert answer.report["way"] == "split"
        check_trace(json.loads(trace.read_text() + "]"), answer.report)
    finally:
        set_rate(server, None)
        server.faults.emptied()
        with suppress(Exception):
            server.client.detach_storage()
        server.client.attach_storage("cacheflow", options=server.storage_options)


def check_trace(events: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """Two lanes with all the work of the report, nothing of a lane at the same time."""
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(lanes.values()) == ["I/O", "compute"]
    tokens = dict.fromkeys(lanes.values(), 0)
    for tid, name in lanes.items():
        work = sorted(
            (e["ts"], e["dur"], e["args"]) for e in events if e.get("tid") == tid and e["ph"] == "X"
        )
        tokens[name] = sum(args["tokens"] for _, _, args in work)
        assert all(a[0] + a[1] <= b[0] for a, b in pairwise(work))
    assert tokens["I/O"] == report["loaded_tokens"]
    assert tokens["compute"] >= report["computed_tokens"]
    assert any(e["name"] == f"met at token {report['meetings'][0]}" for e in events)


# -- other servers


@pytest.mark.full
@uses(*MATRIX)
def test_every_page_size_chunk_and_schedule(server, pool):
    prompts = [random_prompt(PREFIX + PAGE + odd, seed=80 + odd) for odd in (0, 7)]
    controls = fill(server, *prompts)
    long_control = ask(server, random_prompt(100, seed=33), tokens=80)
    server.evict_device()
    for policy in POLICIES:
        set_rate(server, BALANCED)
        answer = ask(server, prompts[0], policy)
        assert answer.same_as(controls[0])
        assert add_up(answer, answer.report["stop"])
        server.evict_device()
    server.faults.set(fail_loads=1)
    assert ask(server, prompts[1], "split").same_as(controls[1])
    server.evict_device()
    decode = pool.submit(ask, server, random_prompt(100, seed=33), tokens=80)
    server.faults.wait_for(lambda state: state.running == 1)
    answers = list(pool.map(lambda p, policy: ask(server, p, policy), prompts, ("split", "load")))
    for answer, control in zip(answers, controls, strict=True):
        assert answer.same_as(control)
    assert decode.result(60).same_as(long_control)


@pytest.mark.full
@uses(*OUTSIDE)
def test_servers_outside_the_envelope_say_so_and_leave_it_to_sglang(_server):
    server = _server
    control = ask(server, PROMPT)
    server.evict_device()
    answer = ask(server, PROMPT, "split")
    assert answer.same_as(control)
    assert answer.generation.cached.host > 0
    assert answer.report.get("way", "sglang") == "sglang"
    log = server.process.log_path.read_text()
    ranks = 2 if server.shape.name == "outside-two-ranks" else 1
    assert log.count("cacheflow: no two-pointer restores with") == ranks
