import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cacheflow_sgl.replay import load_trace
from cacheflow_sgl.replay.prompts import BLOCK_TOKENS, BlockPrompt, Message, RawPrompt, TextPrompt
from cacheflow_sgl.replay.trace import Request, Session, Trace
from cacheflow_sgl.simulate.traces import holds_text, requests_of

BLOCK_BYTES = 4 * BLOCK_TOKENS


def trace(*sessions: tuple[Request, ...]) -> Trace:
    return Trace("t", "f", tuple(Session(str(at), turns) for at, turns in enumerate(sessions)))


def mooncake(at_s: float, *ids: int, tail: int = 0) -> tuple[Request]:
    """A request of full blocks, and of `tail` tokens of one more."""
    length = BLOCK_TOKENS * len(ids) + tail
    blocks = (*ids, 999) if tail else ids
    return (Request("s", 0, BlockPrompt(blocks, length), at_s, 7),)


def raw(text: str, at_s: float | None = None) -> tuple[Request]:
    return (Request("s", 0, RawPrompt(text), at_s),)


def test_hash_ids_are_exact():
    (request,) = requests_of(trace(mooncake(3.0, 1, 2, tail=5)), speed=2)
    assert request.prompt_tokens == 2 * BLOCK_TOKENS + 5
    assert request.output_tokens == 7
    assert request.blocks == (1, 2, 999)
    assert request.at_s == 1.5
    assert not holds_text(trace(mooncake(3.0, 1)))


@given(
    st.text("ab", min_size=1, max_size=40),
    st.text("ab", max_size=40),
    st.text("ab", max_size=40),
)
def test_texts_share_the_blocks_of_their_common_prefix(shared, one, other):
    texts = [(shared + end).replace("", "x" * 100) for end in (one, other)]
    first, second = requests_of(trace(*map(raw, texts)))
    for request, text in zip((first, second), texts, strict=True):
        assert request.prompt_tokens == max(len(text) // 4, 1)
        assert len(request.blocks) == request.prompt_tokens // BLOCK_TOKENS
    common = next(
        (at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b),
        min(map(len, texts)),
    )
    pairs = zip(first.blocks, second.blocks, strict=False)
    assert [a == b for a, b in pairs] == [
        at < common // BLOCK_BYTES for at in range(min(len(first.blocks), len(second.blocks)))
    ]


def test_text_is_an_estimate_and_token_ids_are_not():
    assert holds_text(trace(raw("hello")))
    ids = (Request("s", 0, RawPrompt(tuple(range(1100)))),)
    assert not holds_text(trace(ids))
    (request,) = requests_of(trace(ids))
    assert request.prompt_tokens == 1100
    assert len(request.blocks) == 2


def chat(turns: int, *arrivals: float | None) -> tuple[Request, ...]:
    messages = tuple(Message("user", "u" * 4000, reply=at % 2 == 1) for at in range(2 * turns))
    return tuple(
        Request("s", turn, TextPrompt(messages, 2 * turn + 1), arrival)
        for turn, arrival in zip(range(turns), arrivals, strict=True)
    )


def test_turns_without_times_follow_one_another():
    requests = requests_of(trace(chat(3, None, None, None), chat(1, None)))
    assert [request.after for request in requests] == [None, 0, 1, None]
    assert {request.at_s for request in requests} == {0.0}
    assert requests[0].output_tokens == 1000, "as long as the reply"
    assert requests[1].blocks[: len(requests[0].blocks)] == requests[0].blocks


def test_closed_turns_follow_one_another_whatever_their_times():
    chats = trace(chat(2, 1.0, 9.0), chat(2, 0.0, 2.0))
    timed = requests_of(chats)
    assert [request.at_s for request in timed] == [0.0, 1.0, 2.0, 9.0]
    assert {request.after for request in timed} == {None}
    closed = requests_of(chats, "closed")
    assert [request.after for request in closed] == [None, None, 0, 1]
    assert [request.at_s for request in closed] == [0.0, 1.0, 0.0, 0.0]


def test_closed_hash_ids_follow_the_one_they_go_on_from():
    requests = requests_of(
        trace(
            mooncake(0, 1, 2, tail=9),
            mooncake(1, 1, 3),
            mooncake(2, 1, 2, 4),  # goes on from 0
            mooncake(3, 1, 2, 5),  # 0 has its next turn already
            mooncake(4, 1, 2, 4, 6),  # goes on from 2
            mooncake(5, 8, 2),  # the second block is that of another prefix
        ),
        "closed",
    )
    assert [request.after for request in requests] == [None, None, 0, None, 2, None]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12))
def test_whom_a_closed_request_follows_is_earlier_and_has_one_follower(chains):
    traced = trace(*(mooncake(at, *ids) for at, ids in enumerate(chains)))
    requests = requests_of(traced, "closed")
    follows = [request.after for request in requests if request.after is not None]
    assert len(set(follows)) == len(follows)
    for request in requests:
        if request.after is not None:
            before = requests[request.after]
            assert before.rid < request.rid
            assert len(before.blocks) < len(request.blocks)
            assert request.blocks[: len(before.blocks)] == before.blocks


def test_requests_are_numbered_by_arrival(tmp_path: Path):
    lines = [
        {"timestamp": ms, "input_length": 512, "output_length": 1, "hash_ids": [ms]}
        for ms in (3000, 1000, 2000)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    requests = requests_of(load_trace(tmp_path / "t.jsonl"))
    assert [(request.rid, request.at_s) for request in requests] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [request.blocks for request in requests] == [(1000,), (2000,), (3000,)]
