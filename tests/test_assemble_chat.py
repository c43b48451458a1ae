"""Deltas of a chat fold into the message that vLLM writes unstreamed."""

import json
from typing import Any

import pytest
from reassembly import chunk, delta, entries, folded

from proxy.api import Api
from proxy.assemble import Assembly, AssemblyError


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (chunk(), "a chunk of the stream has a choice without delta"),
        (delta(content=["x"]), "a chunk of the stream has a list where content belongs"),
        (delta(tool_calls=[{"function": {}}]), "a chunk of the stream has a tool call without an index"),
        (delta(tool_calls=["f"]), "a chunk of the stream has a tool call without an index"),
        (delta(tool_calls=[{"index": 0, "function": "f"}]), "a chunk of the stream has a str where function belongs"),
    ],
)
def test_a_foreign_chat_event_is_an_error_that_says_why(data: bytes, message: str) -> None:
    with pytest.raises(AssemblyError) as caught:
        Assembly(Api.CHAT, {}).feed(data)
    assert str(caught.value) == message


def test_a_cut_chat_counts_the_prompt_by_ids_that_the_client_does_not_get() -> None:
    role = json.loads(delta(role="assistant", content="")) | {"prompt_token_ids": [1, 2, 3]}
    assembly = folded(Api.CHAT, {"logprobs": True}, json.dumps(role).encode(), entries(None, None))
    assembly.abort_open()
    reply = json.loads(assembly.reply())
    assert reply["usage"]["prompt_tokens"] == 3
    assert reply["usage"]["completion_tokens"] == 2
    assert reply["prompt_token_ids"] is None
    assert reply["choices"][0]["token_ids"] is None
    assert "text" not in reply["choices"][0]


CALL = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f"}}


def _message(request: dict[str, Any], *data: bytes) -> tuple[dict[str, Any], str]:
    reply = json.loads(folded(Api.CHAT, request, delta(role="assistant", content=""), *data).reply())
    return reply["choices"][0]["message"], reply["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    ("tool_choice", "arguments", "end", "content", "written", "finish_reason"),
    [
        ("auto", '{"a" :1}', "tool_calls", None, '{"a": 1}', "tool_calls"),
        ("auto", '{"a" :1}', "length", None, '{"a": 1}', "tool_calls"),
        ("auto", '{"a" :', "length", None, '{"a" :', "length"),
        ("auto", '{"a" :1}', "abort", None, '{"a": 1}', "abort"),
        ("required", '{"\\u00e9":1}', "stop", "", '{"é": 1}', "tool_calls"),
        ("required", '{"a":1}', "length", "", '{"a": 1}', "length"),
        ({"type": "function"}, '{"a":1}', "stop", "", '{"a": 1}', "stop"),
    ],
)
def test_a_tool_call_is_written_as_vllm_writes_it(
    tool_choice: Any, arguments: str, end: str, content: str | None, written: str, finish_reason: str
) -> None:
    pieces = [delta(tool_calls=[{"index": 0, "function": {"arguments": piece}}]) for piece in arguments]
    message, reason = _message(
        {"tools": [{}], "tool_choice": tool_choice}, delta(tool_calls=[CALL]), *pieces, delta(finish_reason=end)
    )
    call = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": written}}
    assert (message["content"], message["tool_calls"], reason) == (content, [call], finish_reason)
    assert [*message].index("tool_calls") == [*message].index("reasoning") - 1


@pytest.mark.parametrize(
    ("request_body", "pieces", "content", "reasoning"),
    [
        ({}, [{"content": ""}], "", None),
        ({}, [{"content": "a"}, {"content": None}, {}, {"content": "b"}], "ab", None),
        ({}, [{"reasoning": "think"}, {"reasoning": "ing"}], None, "thinking"),
        ({}, [{"reasoning": "think"}, {"content": " "}], " ", "think"),
        ({"tools": [{}]}, [{"content": "\n"}, {"tool_calls": [CALL]}], None, None),
        ({"tools": [{}]}, [{"content": "See:"}, {"tool_calls": [CALL]}], "See:", None),
        ({"tools": [{}], "tool_choice": "none"}, [{"content": ""}], "", None),
    ],
    ids=["empty", "text", "reasoning", "both", "call", "text-and-call", "no-tools"],
)
def test_content_is_null_where_vllm_leaves_it_out(
    request_body: dict[str, Any], pieces: list[dict[str, Any]], content: str | None, reasoning: str | None
) -> None:
    message, _ = _message(request_body, *(delta(**piece) for piece in pieces), delta(finish_reason="stop"))
    assert (message["content"], message["reasoning"]) == (content, reasoning)


def test_deltas_vllm_does_not_know_are_pieces_of_one_string() -> None:
    message, _ = _message({}, delta(reasoning_content="a"), delta(reasoning_content="b", finish_reason="stop"))
    assert message["reasoning_content"] == "ab"
