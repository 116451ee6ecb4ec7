"""Every format, as its makers write it; what cannot be read is named and skipped."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cacheflow_sgl.replay import FORMATS, ReplayError, Trace, load_trace
from cacheflow_sgl.replay.formats import READERS
from cacheflow_sgl.replay.prompts import BlockPrompt, RawPrompt, TextPrompt

Writer = Callable[..., Path]

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
]
CHAT_TURNS = [
    "[system]\nbe brief\n\n[user]\none?\n\n[assistant]\n",
    "[system]\nbe brief\n\n[user]\none?\n\n[assistant]\n1\n\n[user]\ntwo?\n\n[assistant]\n",
]


def texts(trace: Trace) -> list[list[str]]:
    """The text of every turn, session by session."""
    found = []
    for session in trace.sessions:
        prompts = [r.prompt for r in session.requests]
        assert all(isinstance(p, TextPrompt) for p in prompts)
        found.append([p.text() for p in prompts if isinstance(p, TextPrompt)])
    return found


def one(value: Any, name: str, write: Writer, trace_format: str = "auto") -> Trace:
    return load_trace(write(name, json.dumps(value)), trace_format)


def test_every_format_has_a_reader() -> None:
    assert set(FORMATS) == {"auto", *READERS}


def test_mooncake(trace_file: Writer) -> None:
    path = trace_file(
        "conversation_trace.jsonl",
        '{"timestamp": 27000, "input_length": 513, "output_length": 52, "hash_ids": [46, 47]}',
        '{"timestamp": 28500, "input_length": 512, "output_length": 1, "hash_ids": [46, 9]}',
    )
    trace = load_trace(path)
    assert trace.format == "mooncake"
    first, second = trace.requests()
    assert first.prompt == BlockPrompt((46, 47), 513)
    assert second.prompt == BlockPrompt((46,), 512)  # an id more than the length needs
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.5)
    assert (first.max_new_tokens, second.max_new_tokens) == (52, 1)


def test_swe_agent_history(trace_file: Writer) -> None:
    history = [
        {**CHAT[0], "agent": "main", "message_type": "system_prompt"},
        {"role": "user", "content": "demo", "is_demo": True},
        {"role": "assistant", "content": "shown", "is_demo": True},
        {"role": "user", "content": [{"type": "text", "text": "fix it", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": "look",
            "thought": "look",
            "action": "ls",
            "tool_calls": [{"function": {"name": "bash", "arguments": '{"command":"ls"}'}}],
        },
        {"role": "tool", "content": "a.py", "tool_call_ids": ["x"]},
        {"role": "assistant", "content": None},
    ]
    trace = one({"trajectory": [], "history": history, "info": {}}, "a.traj", trace_file)
    assert trace.format == "swe-agent"
    [[first, second]] = texts(trace)
    assert first.endswith("[assistant]\nshown\n\n[user]\nfix it\n\n[assistant]\n")
    assert second == first + 'look\n[call bash] {"command":"ls"}\n\n[tool]\na.py\n\n[assistant]\n'


def test_swe_agent_attempts_are_sessions(trace_file: Writer) -> None:
    trace = one({"attempts": [{"history": CHAT}, {"history": CHAT}]}, "a.traj", trace_file)
    assert [s.name for s in trace.sessions] == ["a.traj:1#1", "a.traj:1#2"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("django.traj.json", {"messages": CHAT}),
        ("a.json", {"messages": CHAT, "info": {}, "trajectory_format": "mini-swe-agent-1.1"}),
        ("bare.traj.json", CHAT),
    ],
)
def test_mini_swe_agent(name: str, value: Any, trace_file: Writer) -> None:
    trace = one(value, name, trace_file)
    assert trace.format == "mini-swe-agent"
    assert texts(trace) == [CHAT_TURNS]


def test_mini_swe_agent_keeps_native_model_output(trace_file: Writer) -> None:
    """Version 2 with the Responses API: answers and tool results have no role."""
    answer = {
        "object": "response",
        "output": [
            {"type": "reasoning", "summary": []},
            {"type": "message", "content": [{"type": "output_text", "text": "look"}]},
            {"type": "function_call", "name": "bash", "arguments": '{"command": "ls"}'},
        ],
    }
    result = {"type": "function_call_output", "call_id": "x", "output": "a.py"}
    value = {"messages": [*CHAT[:2], answer, result, answer, {"role": "exit", "content": ""}]}
    [[first, second]] = texts(one(value, "a.traj.json", trace_file))
    assert first == CHAT_TURNS[0]
    assert second == first + 'look\n[call bash] {"command": "ls"}\n\n[tool]\na.py\n\n[assistant]\n'


def test_sharegpt(trace_file: Writer) -> None:
    value = [
        {
            "id": "1",
            "conversations": [
                {"from": "gpt", "value": "unasked"},
                {"from": "human", "value": "one?"},
                {"from": "gpt", "value": "1"},
            ],
        }
    ]
    trace = one(value, "ShareGPT_V3.json", trace_file)
    assert trace.format == "sharegpt"
    assert texts(trace) == [["[assistant]\nunasked\n\n[user]\none?\n\n[assistant]\n"]]


def test_lmsys_and_wildchat(trace_file: Writer) -> None:
    lines = [
        json.dumps({"conversation_id": "a", "model": "m", "conversation": CHAT}),
        json.dumps({"conversation_hash": "b", "conversation": CHAT[:3], "toxic": False}),
    ]
    trace = load_trace(trace_file("lmsys.jsonl", *lines))
    assert trace.format == "lmsys"
    assert texts(trace) == [CHAT_TURNS, CHAT_TURNS[:1]]
    wildchat = trace_file("wildchat.jsonl", lines[1])
    for trace_format in ("auto", "wildchat"):
        trace = load_trace(wildchat, trace_format)
        assert trace.format == "wildchat"
        assert texts(trace) == [CHAT_TURNS[:1]]


def test_openai_requests_become_sessions(trace_file: Writer) -> None:
    """A request that starts with all messages of another one is its next turn."""
    other = [{"role": "user", "content": "hello"}]
    lines = [
        json.dumps({"custom_id": "1", "body": {"messages": CHAT[:2], "max_tokens": 9}}),
        json.dumps({"messages": other, "max_completion_tokens": 3, "model": "m"}),
        json.dumps({"custom_id": "2", "body": {"messages": CHAT[:4]}}),
        json.dumps({"prompt": "once upon"}),
        json.dumps({"prompt": [1, 2, 3]}),
    ]
    trace = load_trace(trace_file("requests.jsonl", *lines))
    assert trace.format == "openai-jsonl"
    assert [len(s.requests) for s in trace.sessions] == [2, 1, 1, 1]
    turns = trace.sessions[0].requests
    assert [r.prompt.text() for r in turns if isinstance(r.prompt, TextPrompt)] == CHAT_TURNS
    assert [(r.session, r.turn) for r in turns] == [("requests.jsonl:1", k) for k in (0, 1)]
    assert [r.max_new_tokens for r in trace.requests()] == [9, None, 3, None, None]
    assert trace.sessions[2].requests[0].prompt == RawPrompt("once upon")
    assert trace.sessions[3].requests[0].prompt == RawPrompt((1, 2, 3))


def test_openai_timestamps(trace_file: Writer) -> None:
    stamps = [1.7e12, 1_700_000_001, "2023-11-14T22:13:22Z"]  # ms, s, ISO 8601
    lines = [json.dumps({"timestamp": t, "prompt": "x"}) for t in stamps]
    trace = load_trace(trace_file("r.jsonl", *lines))
    assert [r.arrival_s for r in trace.requests()] == [0.0, 1.0, 2.0]


def test_broken_lines_are_named_and_skipped(trace_file: Writer) -> None:
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}'
    path = trace_file(
        "t.jsonl",
        good,
        "{half a line",
        "",
        '{"timestamp": 0, "input_length": 5}',
        '{"timestamp": 0, "input_length": 600, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 0, "hash_ids": []}',
        "17",
        good,
    )
    trace = load_trace(path)
    assert len(trace.sessions) == 2
    assert [broken.line for broken in trace.broken] == [2, 4, 5, 6, 7]
    assert str(trace.broken[1]) == "t.jsonl:4: mooncake: Object missing required field `hash_ids`"


def test_broken_chat_message_is_named(trace_file: Writer) -> None:
    lines = [json.dumps({"conversation": CHAT}), json.dumps({"conversation": [*CHAT, {"x": 1}]})]
    trace = load_trace(trace_file("c.jsonl", *lines))
    assert [str(b) for b in trace.broken] == [
        "c.jsonl:2: lmsys: message 5: a message has neither 'role' nor 'from'"
    ]


@pytest.mark.parametrize("content", ["", "nonsense", "{}", "[]", "null", '{"conversation": []}'])
@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.traj"])
def test_nothing_usable_is_one_clear_line(name: str, content: str, trace_file: Writer) -> None:
    with pytest.raises(ReplayError, match=r"no usable session") as error:
        load_trace(trace_file(name, content))
    assert "\n" not in str(error.value)


def test_missing_file_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="no such file"):
        load_trace(tmp_path / "none.jsonl")
    with pytest.raises(ReplayError, match="no trace in this folder"):
        load_trace(tmp_path)
    with pytest.raises(ReplayError, match="unknown format 'cvs'; formats: auto, mooncake"):
        load_trace(tmp_path, "cvs")


def test_folder_of_formats(trace_file: Writer, tmp_path: Path) -> None:
    trace_file("b/a.traj", json.dumps({"history": CHAT}))
    trace_file("a.jsonl", json.dumps({"conversation": CHAT}))
    trace_file("config.json", "{}")
    trace_file("notes.txt", "not looked at")
    trace = load_trace(tmp_path)
    assert trace.format == "lmsys+swe-agent"
    assert [s.name for s in trace.sessions] == ["a.jsonl:1", "b/a.traj:1"]
    assert [str(b) for b in trace.broken] == ["config.json:1: not a trace in any known format"]
    assert trace.note == (
        "read as lmsys: a.jsonl; read as swe-agent: b/a.traj; skipped: config.json, notes.txt"
    )


def test_a_folder_of_one_format_needs_no_note(trace_file: Writer, tmp_path: Path) -> None:
    path = trace_file("0.jsonl", json.dumps({"conversation": CHAT}))
    trace_file("1.jsonl", json.dumps({"conversation": CHAT}))
    assert load_trace(tmp_path).note == load_trace(path).note == ""


def test_the_note_on_a_folder_of_many_files_is_short(trace_file: Writer, tmp_path: Path) -> None:
    for number in range(8):
        trace_file(f"{number}.jsonl", json.dumps({"conversation": CHAT}))
    trace_file("README.md", "about them")
    names = ", ".join(f"{number}.jsonl" for number in range(5))
    assert load_trace(tmp_path).note == f"read as lmsys: {names} and 3 more; skipped: README.md"


def test_jsonl_under_the_name_of_json(trace_file: Writer) -> None:
    line = json.dumps({"conversation": CHAT})
    assert len(load_trace(trace_file("x.json", line, line)).sessions) == 2


def test_given_format_overrides_detection(trace_file: Writer) -> None:
    path = trace_file("x.json", json.dumps({"messages": CHAT}))
    assert load_trace(path).format == "openai-jsonl"
    assert texts(load_trace(path, "mini-swe-agent")) == [CHAT_TURNS]


DOCUMENTS: dict[str, tuple[str, Any]] = {
    "mooncake": ("a.jsonl", {"timestamp": 0, "input_length": 5, "hash_ids": [1]}),
    "swe-agent": ("a.traj", {"history": CHAT, "info": {}}),
    "mini-swe-agent": (
        "a.json",
        {"messages": CHAT, "info": {}, "trajectory_format": "mini-swe-agent-1.1"},
    ),
    "sharegpt": ("a.json", {"conversations": [{"from": "human", "value": "?"}, CHAT[2]]}),
    "wildchat": ("a.jsonl", {"conversation": CHAT, "conversation_hash": "b"}),
    "lmsys": ("a.jsonl", {"conversation": CHAT}),
    "openai-jsonl": ("a.jsonl", {"messages": CHAT[:2]}),
}


@pytest.mark.parametrize("found", DOCUMENTS)
@pytest.mark.parametrize("given", READERS)
def test_a_given_format_that_the_content_has_not_is_refused(
    given: str, found: str, trace_file: Writer
) -> None:
    name, value = DOCUMENTS[found]
    if given == found or {given, found} == {"wildchat", "lmsys"}:  # these two have one shape
        assert one(value, name, trace_file, given).format == given
    else:
        with pytest.raises(ReplayError, match=f"first: {name}:1: {given}: ") as error:
            one(value, name, trace_file, given)
        if given != "mini-swe-agent" or found != "openai-jsonl":
            assert f"; it looks like {found}" in str(error.value)


def test_a_list_of_messages_is_neither_lmsys_nor_swe_agent(trace_file: Writer) -> None:
    for trace_format in ("lmsys", "swe-agent"):
        with pytest.raises(ReplayError, match=f"{trace_format}: no '.*; it looks like sharegpt"):
            one(CHAT, "a.json", trace_file, trace_format)


def test_demo_is_bundled_and_grows_turn_by_turn() -> None:
    trace = load_trace("demo")
    assert trace.name == "demo"
    assert not trace.broken
    assert len(trace.sessions) == 4
    for turns in texts(trace):
        assert 5 <= len(turns) <= 6
        assert len(turns[-1].encode()) > 7000
        assert all(b.startswith(a) for a, b in pairwise(turns))


SHARED_TRACES = Path(__file__).parents[3] / "shared" / "traces"
if SHARED_TRACES.is_dir():  # recorded traces beside the repository, which does not ship them

    def test_recorded_traces_load_whole() -> None:
        agents = load_trace(SHARED_TRACES / "swe_agent")
        assert not agents.broken
        assert [len(s.requests) for s in agents.sessions] == [14, 11, 13]
        chats = load_trace(SHARED_TRACES / "mooncake")
        assert not chats.broken
        assert len(chats.sessions) == 12_031
