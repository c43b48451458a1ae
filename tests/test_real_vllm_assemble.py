"""On a real vLLM a stream of a request folds into the reply that the same request gets unstreamed, field for field."""

import json
from typing import Any, Literal

import httpx
import pytest
from conftest import VllmPair
from reassembly import differences, fold

from proxy.api import Api
from proxy.assemble import AssemblyError, stream_request

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

TEXTS = ["This program", "You may convey", "Each"]
IDS = [[10, 11, 12], [20, 21]]
PREFILL = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "This is"}]

COMPLETIONS: dict[str, dict[str, Any]] = {
    "no-logprobs": {},
    "logprobs-0": {"logprobs": 0},
    "logprobs-5": {"logprobs": 5},
    "one-token": {"logprobs": 0, "max_tokens": 1},
    "long": {"logprobs": 3, "max_tokens": 300, "ignore_eos": True},
    "interval-4": {"logprobs": 0, "max_tokens": 30, "stream_interval": 4},
    "token-ids": {"logprobs": 1, "return_token_ids": True},
    "tokens-as-ids": {"logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True},
    "text-prompt": {"logprobs": 1, "prompt": TEXTS[0], "return_token_ids": True},
    "stop-string": {"logprobs": 0, "stop": ["e", "a"], "max_tokens": 60, "return_token_ids": True},
    "stop-string-kept": {"logprobs": 0, "stop": ["e", "a"], "max_tokens": 60, "include_stop_str_in_output": True},
    "stop-token": {"logprobs": 0, "stop_token_ids": [*range(0, 300, 3)], "max_tokens": 60, "return_token_ids": True},
    "special-tokens": {"logprobs": 0, "skip_special_tokens": False, "max_tokens": 40},
    "truncated": {"logprobs": 0, "truncate_prompt_tokens": 2},
    "json": {"logprobs": 0, "response_format": {"type": "json_object"}, "max_tokens": 20},
    "chosen-logprobs": {"logprobs": 1, "logprob_token_ids": [5, 6]},
}
# What vLLM's Rust front end refuses, or leaves out of its streams.
COMPLETIONS_OF_PYTHON: dict[str, dict[str, Any]] = {
    "n-3": {"n": 3, "logprobs": 1},
    "long-n-4": {"n": 4, "logprobs": 3, "max_tokens": 200, "ignore_eos": True},
    "prompts-2-n-2": {"prompt": IDS, "n": 2, "logprobs": 0, "return_token_ids": True},
    "texts-3-n-2": {"prompt": TEXTS, "n": 2, "logprobs": 1},
    "echo": {"echo": True, "logprobs": 1},
    "echo-token-ids": {"echo": True, "logprobs": 1, "return_token_ids": True},
    "echo-text": {"echo": True, "logprobs": 1, "prompt": TEXTS[0]},
    "echo-texts-3": {"echo": True, "logprobs": 0, "prompt": TEXTS},
    "echo-only": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "echo-no-logprobs": {"echo": True},
}
CHATS: dict[str, dict[str, Any]] = {
    "chat-no-logprobs": {},
    "chat": {"logprobs": True},
    "chat-top-3": {"logprobs": True, "top_logprobs": 3, "return_token_ids": True},
    "chat-tokens-as-ids": {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
    "chat-one-token": {"logprobs": True, "max_tokens": 1},
    "chat-stop-string": {"logprobs": True, "stop": ["e", "a"], "max_tokens": 60, "return_token_ids": True},
    "chat-prompt-text": {"logprobs": True, "return_prompt_text": True, "return_token_ids": True},
    "chat-json": {"logprobs": True, "response_format": {"type": "json_object"}, "max_tokens": 30},
    "chat-echo": {"logprobs": True, "echo": True, "add_generation_prompt": False},
    "chat-continued": {
        "logprobs": True,
        "echo": True,
        "messages": PREFILL,
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}
CHATS_OF_PYTHON: dict[str, dict[str, Any]] = {
    "chat-n-3": {"n": 3, "logprobs": True, "top_logprobs": 1},
    "chat-long-n-3": {"n": 3, "logprobs": True, "max_tokens": 200, "ignore_eos": True},
}
BOTH = ("python", "rust")
CASES = [
    *((server, Api.COMPLETIONS, name, asked) for server in BOTH for name, asked in COMPLETIONS.items()),
    *(("python", Api.COMPLETIONS, name, asked) for name, asked in COMPLETIONS_OF_PYTHON.items()),
    *((server, Api.CHAT, name, asked) for server in BOTH for name, asked in CHATS.items()),
    *(("python", Api.CHAT, name, asked) for name, asked in CHATS_OF_PYTHON.items()),
]


def request_of(api: Api, asked: dict[str, Any]) -> dict[str, Any]:
    said = {"prompt": IDS[0]} if api is Api.COMPLETIONS else {"messages": PREFILL[:1]}
    return {"model": "tiny", "max_tokens": 6, "seed": 1, "temperature": 1.0, **said, **asked}


@pytest.mark.parametrize(
    ("server", "api", "asked"),
    [pytest.param(server, api, asked, id=f"{server}-{name}") for server, api, name, asked in CASES],
)
def test_a_stream_folds_into_the_unstreamed_reply(
    vllm_clean: VllmPair, server: Literal["python", "rust"], api: Api, asked: dict[str, Any]
) -> None:
    url = getattr(vllm_clean, server).url + api
    request = request_of(api, asked)
    streamed_request = stream_request(api, request)
    assert streamed_request is not None
    whole = httpx.post(url, json=request, timeout=60)
    streamed = httpx.post(url, json=streamed_request, timeout=60)
    assert (whole.status_code, streamed.status_code) == (200, 200)
    reply = json.loads(fold(api, request, streamed.content).reply())
    assert differences(reply, whole.json()) == []


def test_the_rust_front_end_streams_no_echo(vllm_clean: VllmPair) -> None:
    request = request_of(Api.COMPLETIONS, {"echo": True, "logprobs": 0})
    streamed = httpx.post(vllm_clean.rust.url + Api.COMPLETIONS, json=stream_request(Api.COMPLETIONS, request))
    with pytest.raises(AssemblyError, match="leaves out the prompt that echo asked for"):
        fold(Api.COMPLETIONS, request, streamed.content)
