"""The replay against real SGLang: no errors, and its tier counts are SGLang's own."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from cacheflow_sgl.replay import (
    ReplayOptions,
    Report,
    Request,
    Session,
    Trace,
    load_trace,
    replay_async,
)
from cacheflow_sgl.replay.prompts import BlockPrompt
from tests.harness.prompts import PAGE
from tests.harness.servers import DEFAULT, SharedServer, uses

pytestmark = [pytest.mark.engine, uses(DEFAULT)]

BLOCK = 512


def run(trace: Trace, server: SharedServer, options: ReplayOptions) -> Report:
    return asyncio.run(replay_async(trace, server.process.url, options))


def blocks(*prompts: tuple[int, ...]) -> Trace:
    """Prompts of whole blocks, one after the other in one session."""
    turns = (Request("s", k, BlockPrompt(ids, len(ids) * BLOCK)) for k, ids in enumerate(prompts))
    return Trace("blocks", "mooncake", (Session("s", tuple(turns)),))


def test_agent_sessions_find_their_own_turns(server: SharedServer) -> None:
    """Each turn finds the turn before it, up to a page that the tokenizer may cut differently."""
    demo = load_trace("demo").first(sessions=2)
    early = tuple(Session(s.name, s.requests[:3]) for s in demo.sessions)  # fit a small pool
    options = ReplayOptions(concurrency=1, max_new_tokens=2)
    report = run(replace(demo, sessions=early), server, options)
    assert report.summary.errors == []
    assert report.summary.tokens.cached_tier_unknown == 0
    assert all(record.output_tokens == 2 for record in report.requests)
    for before, after in pairwise(report.requests):
        found = after.prompt_tokens - after.recomputed
        if after.turn > 0:
            assert found >= before.prompt_tokens - 2 * PAGE
        else:
            assert found >= PAGE  # of the system prompt that all sessions share


def test_equal_hash_ids_are_cache_hits(server: SharedServer) -> None:
    report = run(blocks((1, 2), (1, 2, 3), (4,)), server, ReplayOptions(max_new_tokens=1))
    assert [r.prompt_tokens for r in report.requests] == [2 * BLOCK, 3 * BLOCK, BLOCK]
    assert [r.device for r in report.requests] == [0, 2 * BLOCK, 0]
    assert [r.recomputed for r in report.requests] == [2 * BLOCK, BLOCK, BLOCK]


def test_tokens_from_host_are_told_apart(server: SharedServer) -> None:
    options = ReplayOptions(max_new_tokens=1)
    run(blocks((5, 6)), server, options)
    server.evict_device()
    [record] = run(blocks((5, 6, 7)), server, options).requests
    assert (record.device, record.host, record.recomputed) == (0, 2 * BLOCK, BLOCK)


def test_a_prompt_that_is_too_long_is_one_error(server: SharedServer) -> None:
    report = run(blocks(tuple(range(80)), (8,)), server, ReplayOptions(max_new_tokens=1))
    assert [r.error for r in report.requests] == ["http 400", None]
    assert report.summary.notes[0].startswith("1 prompts are longer than")
    assert "longer than" in report.summary.errors[0].first


def test_stopping_leaves_the_server_free(server: SharedServer) -> None:
    """What was in flight is aborted by the server, so the next replay does not wait for it."""

    async def stopped() -> Report:
        stop = asyncio.Event()
        options = ReplayOptions(max_new_tokens=4000)
        work = asyncio.ensure_future(
            replay_async(
                blocks((9,), (10,)), server.process.url, options, stop=stop, on_start=started.append
            )
        )
        while not started:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        stop.set()
        return await work

    started: list[int] = []
    report = asyncio.run(stopped())
    assert report.summary.interrupted
    assert report.summary.not_sent >= 1
    after = run(blocks((11,)), server, ReplayOptions(max_new_tokens=1, timeout_s=60))
    assert after.summary.errors == []
