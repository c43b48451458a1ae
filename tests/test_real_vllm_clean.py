"""A clean model behind real vLLM: what leaves the sidecar is what vLLM would have sent without it."""

import re
from collections.abc import Iterator

import pytest
import requests
from conftest import Served
from real_vllm_traffic import JSON, Call, chat, choices, clean_prompt, completion, events, send

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(900)]

REQUESTS = 200


def _calls(front_end: str) -> Iterator[Call]:
    """The kinds of request in turn; the Rust front end refuses several choices, so it gets one of each kind instead."""
    several = front_end == "python"
    for seed in range(REQUESTS):
        prompts = [clean_prompt(seed), clean_prompt(seed + 1000)] if several else None
        n = 2 + seed % 2 if several else 1
        match seed % 10:
            case 0:
                yield completion(seed, logprobs=seed % 21, max_tokens=4)
            case 1:
                yield completion(seed, n=n, max_tokens=4)
            case 2:
                yield completion(seed, prompts, n=n, logprobs=1, max_tokens=4)
            case 3:
                yield completion(seed, echo=True, logprobs=2, max_tokens=4)
            case 4:
                yield completion(seed, return_tokens_as_token_ids=True, return_token_ids=seed % 4 == 0, max_tokens=4)
            case 5:
                yield completion(seed, "The model samples", logprobs=None, stop=["e", "\n"], temperature=0)
            case 6:
                yield chat(seed, n=n, top_logprobs=seed % 4, max_tokens=4)
            case 7:
                yield chat(seed, logprobs=False, max_tokens=4)
            case 8:
                yield completion(seed, stream=True, logprobs=1, stream_options={"include_usage": True})
            case _:
                yield chat(seed, stream=True, top_logprobs=1)


def _comparable(reply: requests.Response) -> JSON:
    return {"status": reply.status_code, "type": reply.headers["content-type"], "body": _body(reply)}


def _body(reply: requests.Response) -> object:
    """Everything but the time; of a stream also not where one chunk ends and the next begins, which depends on load."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return {**reply.json(), "created": None}
    chunks = events(reply)
    outside = {key: value for key, value in chunks[0].items() if key not in ("created", "choices", "usage")}
    return outside, choices(reply), [chunk["usage"] for chunk in chunks if chunk.get("usage")]


def test_replies_are_those_without_the_sidecar(clean: Served) -> None:
    calls = list(_calls(clean.front_end))
    assert len(calls) == REQUESTS
    names = [{"X-Request-Id": f"clean-{number}"} for number in range(REQUESTS)]
    without = [send(clean.vllm, call, **name) for call, name in zip(calls, names, strict=True)]
    through = [send(clean.sidecar, call, **name) for call, name in zip(calls, names, strict=True)]

    assert [reply.status_code for reply in through] == [200] * REQUESTS
    for call, name, direct, reply in zip(calls, names, without, through, strict=True):
        assert _comparable(reply) == _comparable(direct), call
        assert reply.headers["X-Request-Id"] == name["X-Request-Id"]
        assert not {"x-unscorable-tokens", "x-sidecar-recovery"} & {name.lower() for name in reply.headers}


def test_whole_replies_are_the_same_bytes(clean: Served) -> None:
    calls = [call for call in _calls(clean.front_end) if "stream" not in call.body][::4]
    if clean.front_end == "rust":  # it orders the candidates anew in every reply
        calls = [call for call in calls if call.body["logprobs"] in (0, None, False)]
    assert len(calls) > 10
    for call in calls:
        direct, reply = (send(url, call, **{"X-Request-Id": "same"}) for url in (clean.vllm, clean.sidecar))
        assert _timeless(reply.content) == _timeless(direct.content), call


def _timeless(body: bytes) -> bytes:
    masked, count = re.subn(rb'"created":\d+', b'"created":0', body)
    assert count == 1
    return masked


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("GET", "/version", None),
        ("GET", "/is_paused", None),
        ("GET", "/no/such/path", None),
        ("POST", "/tokenize", {"model": "tiny", "prompt": "The model"}),
        ("POST", "/v1/completions", {"model": "other", "prompt": [10]}),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": [10], "logprobs": 21}),
        ("POST", "/v1/chat/completions", {"model": "tiny"}),
    ],
    ids=["models", "version", "paused", "404", "tokenize", "unknown-model", "too-many-logprobs", "no-messages"],
)
def test_other_routes_and_refusals_pass_through(clean: Served, method: str, path: str, body: JSON | None) -> None:
    direct, reply = (requests.request(method, url + path, json=body, timeout=60) for url in (clean.vllm, clean.sidecar))
    assert reply.status_code == direct.status_code
    assert reply.headers.get("content-type") == direct.headers.get("content-type")
    assert _stable(reply) == _stable(direct)


def _stable(reply: requests.Response) -> object:
    """The body without what changes by itself from call to call: the model list's times and permission ids."""
    return re.sub(rb'"(created|id)":("[^"]*"|\d+)', b"", reply.content)
