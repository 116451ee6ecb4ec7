"""The replay against an HTTP server: what is sent, in which order, and what is made of answers."""

import asyncio
import threading

import pytest

from cacheflow_sgl.replay import (
    ReplayError,
    ReplayOptions,
    Report,
    Request,
    Session,
    Trace,
    load_trace,
    replay_async,
)
from cacheflow_sgl.replay.prompts import BlockPrompt, RawPrompt
from tests.replay.conftest import text_trace
from tests.replay.sglang_stand import SglangStand

QUICK = ReplayOptions(timeout_s=20, max_new_tokens=4)


def run(trace: Trace, stand: SglangStand, options: ReplayOptions = QUICK) -> Report:
    return asyncio.run(replay_async(trace, stand.url, options))


def test_all_is_well(stand: SglangStand) -> None:
    report = run(text_trace(["one", "one and two"], ["three"]), stand)
    summary = report.summary
    assert (summary.requests, summary.succeeded, summary.failed, summary.not_sent) == (3, 3, 0, 0)
    assert not summary.interrupted
    assert summary.input_tokens == len("one" + "one and two" + "three")
    assert summary.output_tokens == 12
    assert summary.errors == []
    assert summary.notes == []
    for record in report.requests:
        assert record.ttft_s is not None
        assert record.ttlt_s is not None
        assert record.tpot_s is not None
        assert 0 < record.ttft_s <= record.ttlt_s
        assert record.tpot_s == pytest.approx((record.ttlt_s - record.ttft_s) / 3)


def test_what_is_sent(stand: SglangStand) -> None:
    trace = Trace(
        "t",
        "openai-jsonl",
        (
            Session("a", (Request("a", 0, RawPrompt("hello"), None, 2),)),
            Session("b", (Request("b", 0, RawPrompt((5, 6, 7)), None, 100),)),
        ),
    )
    run(trace, stand, ReplayOptions(concurrency=1, max_new_tokens=8))
    hello, ids = stand.bodies
    assert hello["text"] == "hello"
    assert hello["stream"] is True
    assert hello["sampling_params"] == {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    assert ids["input_ids"] == [5, 6, 7]
    assert ids["sampling_params"]["max_new_tokens"] == 8


def test_turns_of_a_session_follow_one_another(stand: SglangStand) -> None:
    trace = text_trace(*[[f"{name}{turn}" for turn in range(4)] for name in "abc"])
    run(trace, stand)
    for name in "abc":
        own = [(what, text) for what, text in stand.events if text.startswith(name)]
        assert own == [(w, f"{name}{turn}") for turn in range(4) for w in ("start", "end")]


@pytest.mark.parametrize(("concurrency", "together"), [(1, 1), (2, 2), (8, 4)])
def test_concurrency_is_sessions_at_the_same_time(
    stand: SglangStand, concurrency: int, together: int
) -> None:
    """All prompts wait in the server, so as many are open as the replay lets be open."""
    trace = text_trace(*[[f"%slow {name}"] for name in "abcd"])

    async def watch() -> int:
        options = ReplayOptions(concurrency=concurrency)
        work = asyncio.ensure_future(replay_async(trace, stand.url, options))
        while len(stand.events) < together:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # time for one too many to show itself
        opened = len(stand.events)
        stand.go_on()
        await work
        return opened

    assert asyncio.run(watch()) == together


def timed_trace(*arrivals: float) -> Trace:
    sessions = (
        Session(f"s{n}", (Request(f"s{n}", 0, RawPrompt(f"p{n}"), arrival),))
        for n, arrival in enumerate(arrivals)
    )
    return Trace("t", "mooncake", tuple(sessions))


def test_arrival_times_are_kept_and_scaled(stand: SglangStand) -> None:
    report = run(timed_trace(4.0, 0.0, 2.0), stand, ReplayOptions(speed=10))
    assert [r.session for r in report.requests] == ["s1", "s2", "s0"]
    assert [r.arrival_s for r in report.requests] == [0.0, 0.2, 0.4]
    for record in report.requests:
        assert record.arrival_s is not None
        assert record.sent_s >= record.arrival_s - 0.01  # timers tick in milliseconds


def test_arrival_asap_ignores_times(stand: SglangStand) -> None:
    report = run(timed_trace(0.0, 1e6), stand, ReplayOptions(arrival="asap"))
    assert [r.arrival_s for r in report.requests] == [None, None]
    assert report.summary.succeeded == 2


def test_late_requests_are_noted(stand: SglangStand) -> None:
    """One slot, taken by a prompt that the server holds for more than a second."""
    trace = Trace(
        "t",
        "mooncake",
        tuple(
            Session(n, (Request(n, 0, RawPrompt(p), 0.0),))
            for n, p in (("a", "%slow"), ("b", "quick"))
        ),
    )
    timer = threading.Timer(1.2, stand.go_on)
    timer.start()
    report = run(trace, stand, ReplayOptions(concurrency=1))
    timer.join()
    assert report.requests[1].late_s > 1
    assert any("more --concurrency" in note for note in report.summary.notes)


def test_where_tokens_came_from_adds_up(stand: SglangStand) -> None:
    prompt = "x" * 100
    report = run(text_trace([prompt, prompt]), stand)
    first, second = report.requests
    assert (first.device, first.host, first.storage, first.recomputed) == (0, 0, 0, 100)
    assert (second.device, second.host, second.storage, second.recomputed) == (22, 12, 16, 50)
    tokens = report.summary.tokens
    assert (tokens.device, tokens.host, tokens.storage, tokens.recomputed) == (22, 12, 16, 150)
    assert tokens.cached_tier_unknown == 0


def test_a_server_without_tiers_is_told_apart() -> None:
    with SglangStand(tiers=False) as stand:
        report = run(text_trace(["x" * 100] * 2), stand)
    assert report.summary.tokens.cached_tier_unknown == 50
    assert report.summary.tokens.recomputed == 150
    assert any("does not say which tier" in note for note in report.summary.notes)


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ("%500", "http 500", "out of luck"),
        ("%reject", "http 400", "too long"),
        ("%drop", "dropped", ""),
        ("%short", "dropped", "stream ended before"),
        ("%garbage", "garbage", "not an SGLang event"),
        ("%odd", "garbage", "meta_info"),
        ("%abort", "abort", "gone"),
    ],
)
def test_an_error_is_counted_and_the_replay_goes_on(
    stand: SglangStand, prompt: str, kind: str, message: str
) -> None:
    report = run(text_trace([prompt, "next turn", prompt], ["other"]), stand)
    summary = report.summary
    assert (summary.succeeded, summary.failed, summary.not_sent) == (2, 2, 0)
    [error] = summary.errors
    assert (error.kind, error.count) == (kind, 2)
    assert message in error.first
    assert "\n" not in error.first
    assert summary.input_tokens == len("next turn" + "other")  # of what went well


def test_a_request_that_takes_too_long(stand: SglangStand) -> None:
    report = run(text_trace(["%slow", "quick"]), stand, ReplayOptions(timeout_s=0.5))
    assert [r.error for r in report.requests] == ["timeout", None]
    quick = report.requests[1]
    assert quick.sent_s >= 0.5  # after the turn before it, which does not make it late
    assert quick.late_s < quick.sent_s / 2


def test_a_server_that_goes_away(stand: SglangStand) -> None:
    """Every request gets its record, also those that find no server."""

    async def play() -> Report:
        return await replay_async(
            text_trace(["a", "b", "c"]), stand.url, on_record=lambda record: stand.close()
        )

    report = asyncio.run(play())
    assert [r.error for r in report.requests] == [None, "connect", "connect"]


def test_stop_drops_what_is_in_flight(stand: SglangStand) -> None:
    async def play() -> Report:
        stop = asyncio.Event()
        work = asyncio.ensure_future(
            replay_async(text_trace(["done", "%slow", "never"]), stand.url, stop=stop)
        )
        while not stand.slow_started.is_set():
            await asyncio.sleep(0.01)
        stop.set()
        return await work

    report = asyncio.run(play())
    assert report.summary.interrupted
    assert (report.summary.succeeded, report.summary.not_sent) == (1, 2)
    assert [r.error for r in report.requests] == [None]
    stand.wait_cancelled()  # the server sees the connection go, so it can abort


def test_blocks_become_ids_of_the_servers_tokenizer(stand: SglangStand) -> None:
    session = Session("a", (Request("a", 0, BlockPrompt((1, 2), 600)),))
    trace = Trace("t", "mooncake", (session,))
    run(trace, stand)
    run(trace, stand, ReplayOptions(seed=1))
    run(trace, stand, ReplayOptions(scale=0.25, max_prompt_tokens=140))
    plain, seeded, scaled = (body["input_ids"] for body in stand.bodies)
    assert len(plain) == 600
    assert set(plain) <= set(b" abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert seeded != plain
    assert len(scaled) == 140
    assert scaled[:128] == plain[:128]
    assert scaled[128:] == plain[512:524]


def test_prompts_that_the_server_will_refuse_are_noted(stand: SglangStand) -> None:
    session = Session("a", (Request("a", 0, BlockPrompt((1,) * 8, 4001)),))
    report = run(Trace("t", "mooncake", (session,)), stand)
    assert report.summary.notes[0].startswith("1 prompts are longer than the 4000 tokens")


def test_a_server_without_tokenizer() -> None:
    trace = Trace("t", "mooncake", (Session("a", (Request("a", 0, BlockPrompt((1,), 9)),)),))
    with SglangStand(tokenizes=False) as stand:
        with pytest.raises(ReplayError, match="say --vocab-size"):
            run(trace, stand)
        run(trace, stand, ReplayOptions(vocab_size=80))
        assert set(stand.bodies[0]["input_ids"]) <= set(range(10, 70))
        report = run(text_trace(["x" * 9]), stand, ReplayOptions(max_prompt_tokens=3))
        assert [r.error for r in report.requests] == ["tokenize"]


def test_long_texts_are_clipped_by_the_servers_tokenizer(stand: SglangStand) -> None:
    run(text_trace(["abcdef", "abc"]), stand, ReplayOptions(max_prompt_tokens=4))
    assert stand.bodies[0]["input_ids"] == list(b"abcd")
    assert stand.bodies[1]["text"] == "abc"


def test_long_prompts_of_ids_are_clipped(stand: SglangStand) -> None:
    session = Session("a", (Request("a", 0, RawPrompt((5, 6, 7))),))
    run(Trace("t", "openai-jsonl", (session,)), stand, ReplayOptions(max_prompt_tokens=2))
    assert stand.bodies[0]["input_ids"] == [5, 6]


def test_shared_context_is_in_tokens_and_does_not_depend_on_the_selection(
    stand: SglangStand,
) -> None:
    options = ReplayOptions(shared_context_tokens=3000, sessions=1, limit=2)
    run(load_trace("demo"), stand, options)
    run(load_trace("demo"), stand, ReplayOptions(shared_context_tokens=3000))
    context = stand.bodies[0]["text"][:3000]
    assert context.startswith("[system]\nReference material")
    assert stand.bodies[0]["text"][3000:].startswith("\n\n[system]\nYou are a careful")
    assert len(stand.bodies) == 2 + 23
    assert all(body["text"].startswith(context) for body in stand.bodies)


def test_environment_holds_no_secrets() -> None:
    with SglangStand(key="secret") as stand:
        report = asyncio.run(replay_async(text_trace(["a"]), stand.url, api_key="secret"))
        assert report.summary.succeeded == 1
        assert report.environment.server["model"] == "stand"
        assert report.environment.server["version"] == "0.5.23"
        assert "secret" not in repr(report)
        with pytest.raises(ReplayError, match="--api-key"):
            run(text_trace(["a"]), stand)


def test_no_server() -> None:
    with pytest.raises(ReplayError, match=r"no server at http://127\.0\.0\.1:9"):
        asyncio.run(replay_async(text_trace(["a"]), "http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("option", "value"),
    [("speed", 0), ("concurrency", 0), ("scale", -1), ("limit", 0), ("timeout_s", 0)],
)
def test_impossible_options(option: str, value: int) -> None:
    name = option.removesuffix("_s").replace("_", "-")
    with pytest.raises(ReplayError, match=f"--{name} must be positive"):
        ReplayOptions(**{option: value})  # type: ignore[arg-type]
