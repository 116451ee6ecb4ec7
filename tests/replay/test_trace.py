"""Shaping a trace before it is replayed."""

import pytest

from cacheflow_sgl.replay import ReplayError, Request, Session, Trace
from cacheflow_sgl.replay.prompts import BlockPrompt, Message, TextPrompt
from tests.replay.conftest import text_trace


def chat_session(name: str, *tool_outputs: str) -> Session:
    messages = [Message("user", "task")]
    for output in tool_outputs:
        messages += [Message("assistant", "reply", reply=True), Message("tool", output)]
    messages.append(Message("assistant", "reply", reply=True))
    counts = [n for n, m in enumerate(messages) if m.reply]
    prompts = [TextPrompt(tuple(messages), n) for n in counts]
    return Session(name, tuple(Request(name, k, p) for k, p in enumerate(prompts)))


def chats(*sessions: Session) -> Trace:
    return Trace("t", "swe-agent", sessions)


def test_first_sessions_and_requests() -> None:
    trace = text_trace(["a", "b"], ["c", "d"], ["e"])
    assert [s.name for s in trace.first(sessions=2).sessions] == ["s0", "s1"]
    kept = trace.first(requests=3)
    assert [(r.session, r.turn) for r in kept.requests()] == [("s0", 0), ("s0", 1), ("s1", 0)]
    assert len(kept.sessions) == 2
    assert trace.first() == trace


def test_shared_context_is_made_of_the_tool_outputs_of_all_sessions() -> None:
    trace = chats(chat_session("a", "alpha"), chat_session("b", "beta"))
    context = trace.shared_context(200)
    assert context.startswith("[system]\n")
    assert context.index("alpha") < context.index("beta")
    assert "task" not in context
    assert "reply" not in context
    assert context.index("[reference 3]\nalpha") > 0  # a second round, told apart by its number


@pytest.mark.parametrize("size", [100, 1000, 30_000])
def test_shared_context_has_the_size_asked_for(size: int) -> None:
    trace = chats(chat_session("a", "å" * 50, ""))
    length = len(trace.shared_context(size).removesuffix("\n\n").encode())
    assert size - 1 <= length <= size  # never half a character


def test_every_turn_starts_with_the_shared_context() -> None:
    trace = chats(chat_session("a", "alpha"), chat_session("b", "beta"))
    context = trace.shared_context(300)
    for request in trace.with_context(context).requests():
        assert isinstance(request.prompt, TextPrompt)
        assert request.prompt.text().startswith(context + "[user]\ntask")


def test_shared_context_of_a_chat_without_tool_outputs() -> None:
    assert "task" in chats(chat_session("a")).shared_context(200)


def test_options_that_do_not_fit_the_trace() -> None:
    blocks = Trace("t", "mooncake", (Session("a", (Request("a", 0, BlockPrompt((1,), 9)),)),))
    with pytest.raises(ReplayError, match=r"--scale needs prompts made of hash ids"):
        chats(chat_session("a")).scaled(0.5)
    with pytest.raises(ReplayError, match=r"--shared-context-tokens needs chat messages"):
        blocks.shared_context(100)


def test_blocks_are_clipped() -> None:
    session = Session("a", (Request("a", 0, BlockPrompt((1, 2), 600)),))
    clipped = Trace("t", "mooncake", (session,)).clipped(512)
    assert [r.prompt for r in clipped.requests()] == [BlockPrompt((1,), 512)]
