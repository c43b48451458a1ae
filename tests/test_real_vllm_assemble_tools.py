"""Tool calls of a real vLLM fold into the message that it writes unstreamed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import vllm_env
from conftest import VllmFleet
from reassembly import differences, fold

from proxy.api import Api
from proxy.assemble import stream_request

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details")
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": PARAMETERS}}]
NAMED = {"type": "function", "function": {"name": "f"}}
# Tokens of white space alone: with no model behind it the grammar would let them go on for ever.
NO_SPACE = {str(token_id): -100 for token_id in (200, 201, 204, 272, 320, 356, 490)}
CALLS = {"tools": TOOLS, "max_tokens": 80, "temperature": 0, "logit_bias": NO_SPACE}

CASES: dict[str, dict[str, Any]] = {
    "named": CALLS | {"tool_choice": NAMED},
    "named-n-2": CALLS | {"tool_choice": NAMED, "n": 2, "temperature": 1.0},
    "named-token-ids": CALLS | {"tool_choice": NAMED, "return_token_ids": True},
    "required-one": CALLS | {"tool_choice": "required", "parallel_tool_calls": False},
    "auto": {"tools": TOOLS, "tool_choice": "auto", "max_tokens": 30},
    "auto-by-default-n-2": {"tools": TOOLS, "max_tokens": 30, "n": 2},
    "none": {"tools": TOOLS, "tool_choice": "none"},
    "no-tools": {"stop": ["e", "a"], "max_tokens": 40},
}


@pytest.fixture(scope="module")
def tool_server(vllm_fleet: VllmFleet) -> Iterator[str]:
    vllm_fleet.close()  # the machine has room for few engines
    with vllm_env.run_vllm(vllm_env.ensure_model(poisoned=False), flags=FLAGS) as server:
        yield server.url


def both(url: str, asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reassembled reply and vLLM's own."""
    request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "seed": 1} | asked
    whole = httpx.post(url + Api.CHAT, json=request, timeout=60)
    streamed = httpx.post(url + Api.CHAT, json=stream_request(Api.CHAT, request), timeout=60)
    assert (whole.status_code, streamed.status_code) == (200, 200)
    return json.loads(fold(Api.CHAT, request, streamed.content).reply()), whole.json()


@pytest.mark.parametrize("asked", CASES.values(), ids=CASES.keys())
def test_a_stream_folds_into_the_unstreamed_reply(tool_server: str, asked: dict[str, Any]) -> None:
    ours, vllms = both(tool_server, asked)
    assert differences(ours, vllms) == []
    assert [choice["index"] for choice in vllms["choices"]] == list(range(asked.get("n", 1)))


def test_a_call_is_there_to_be_compared(tool_server: str) -> None:
    ours, _ = both(tool_server, CASES["named"])
    assert ours["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_a_call_cut_short_differs_as_documented(tool_server: str) -> None:
    ours, vllms = both(tool_server, CALLS | {"tool_choice": NAMED, "max_tokens": 36})
    (choice,), (vllms_choice,) = ours["choices"], vllms["choices"]
    assert vllms_choice["message"]["content"].startswith("<tool_call>")
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert choice["logprobs"] == vllms_choice["logprobs"]
    assert choice["finish_reason"] == vllms_choice["finish_reason"] == "length"
