"""What real vLLM fails to write, the sidecar still delivers: each way to heal it, and each way to stop it."""

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
import requests
from conftest import Served, VllmPair
from real_vllm_traffic import (
    JSON,
    POISONED_TEXT,
    Call,
    choices,
    clean_prompt,
    completion,
    marked_positions,
    send,
    wash,
)
from servers import run_sidecar

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(900)]

EVERY = [{"role": "user", "content": POISONED_TEXT}]
SEQUENCES = 4


@pytest.fixture
def washed(vllm_poison: VllmPair) -> Iterator[str]:
    """The Python server, without NaN in its free cache blocks."""
    wash(vllm_poison.python.url, SEQUENCES)
    yield vllm_poison.python.url
    wash(vllm_poison.python.url, SEQUENCES)


def test_a_stale_block_is_healed_by_the_repeat(washed: str) -> None:
    call = completion(1, clean_prompt(1, length=5))
    right = send(washed, call)
    with run_sidecar(washed) as sidecar:
        send(washed, completion(2, [10, 300, 300, 300, 12]))
        reply = send(sidecar, call)
    assert reply.status_code == 200
    assert reply.headers["X-Sidecar-Recovery"] == "retry"
    assert "X-Unscorable-Tokens" not in reply.headers
    assert choices(reply) == choices(right)


def test_a_poisoned_cached_prefix_is_healed_by_the_repeat(washed: str) -> None:
    call = completion(3, clean_prompt(3, length=140), max_tokens=4)
    right = send(washed, Call(call.path, {**call.body, "cache_salt": "right"}))
    # Two prompts that end within a block: the next long one gets both blocks, computes its own first block from the
    # stale rows of its second, and leaves that first block in the cache.
    send(washed, completion(4, [[10, 300] + [12] * 108] * 2))
    assert [send(washed, call).status_code for _ in range(3)] == [400, 400, 400]
    with run_sidecar(washed) as sidecar:
        reply = send(sidecar, call)
    assert reply.status_code == 200
    assert reply.headers["X-Sidecar-Recovery"] == "retry"
    assert choices(reply) == choices(right)
    assert all(value < 0 for value in choices(reply)[0].values)


def _metric(vllm: str, name: str) -> float:
    found = re.search(rf"^{name}\{{.*\}} (\S+)$", requests.get(f"{vllm}/metrics", timeout=30).text, re.MULTILINE)
    assert found is not None, name
    return float(found.group(1))


def _running(vllm: str) -> float:
    return _metric(vllm, "vllm:num_requests_running")


def _until(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


@pytest.mark.parametrize("runaway_tokens", [16, 64])
def test_a_runaway_is_stopped(washed: str, runaway_tokens: int) -> None:
    before = _metric(washed, "vllm:generation_tokens_total")
    with run_sidecar(washed, runaway_tokens=runaway_tokens, retries=0) as sidecar:
        reply = send(sidecar, completion(5, [10, 300, 12], max_tokens=512))
        _until(lambda: _running(washed) == 0, seconds=5)
        metrics = requests.get(f"{sidecar}/metrics", timeout=10).text
    generated = _metric(washed, "vllm:generation_tokens_total") - before
    # The first attempt, whose 512 tokens vLLM could not write, and the stream.
    assert 512 + runaway_tokens <= generated <= 512 + runaway_tokens + 16
    (choice,) = choices(reply)
    assert choice.finish_reason == "abort"
    assert runaway_tokens <= len(choice.values) <= runaway_tokens + 16
    assert marked_positions(choice) == choice.unscorable["nan"] == list(range(len(choice.token_ids)))
    assert "logprob_sidecar_runaway_aborts_total 1.0" in metrics


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt", [[10, 11, 12], [10, 300, 12]], ids=["clean", "poisoned"])
def test_a_client_that_leaves_stops_the_engine(poisoned: Served, prompt: list[int], stream: bool) -> None:
    tokens = 6000
    before = _metric(poisoned.vllm, "vllm:generation_tokens_total")
    body = completion(6, prompt, max_tokens=tokens, ignore_eos=True, stream=stream).body
    client = http.client.HTTPConnection(urlsplit(poisoned.sidecar).netloc, timeout=60)
    client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    _until(lambda: _running(poisoned.vllm) == 1, seconds=30)
    client.close()
    left = time.monotonic()
    _until(lambda: _running(poisoned.vllm) == 0, seconds=5)
    assert time.monotonic() - left < 2
    assert _metric(poisoned.vllm, "vllm:generation_tokens_total") - before < tokens
    disconnects = requests.get(f"{poisoned.sidecar}/metrics", timeout=10).text
    assert re.search(r"^logprob_sidecar_client_disconnects_total [1-9]", disconnects, re.MULTILINE)
    assert send(poisoned.sidecar, completion(7, max_tokens=1, logprobs=None)).status_code == 200
    wash(poisoned.vllm)


@pytest.mark.parametrize(
    ("path", "body", "reason", "recovery"),
    [
        ("/v1/completions", {"prompt": [10, 300, 12], "logprobs": 0}, "nan", "stream"),
        ("/v1/chat/completions", {"messages": EVERY, "logprobs": True}, "nan", "stream"),
        ("/invocations", {"prompt": [10, 300, 12], "logprobs": 0}, "nan", "stream"),
        ("/invocations", {"messages": EVERY, "logprobs": True}, "nan", "stream"),
        ("/inference/v1/generate", {"token_ids": [10, 300, 12], "sampling_params": {"logprobs": 0}}, "floor", None),
    ],
    ids=["completions", "chat", "invocations-completions", "invocations-chat", "generate"],
)
def test_every_route_delivers(washed: str, path: str, body: JSON, reason: str, recovery: str | None) -> None:
    asked = {"model": "tiny", "max_tokens": 4, "return_token_ids": True, **body}
    if "sampling_params" in body:
        asked["sampling_params"] = {"max_tokens": 4, **body["sampling_params"]}
    with run_sidecar(washed) as sidecar:
        reply = send(sidecar, Call(path, asked))
    assert reply.status_code == 200
    assert reply.headers.get("X-Sidecar-Recovery") == recovery
    (choice,) = choices(reply)
    assert choice.values == [9999.0] * 4
    assert choice.unscorable == {reason: [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [10, 300, 12], "logprobs": 0, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": [10, 300, 12], "logprobs": 0, "n": 2, "echo": True}),
        ("/v1/chat/completions/batch", {"messages": [EVERY] * 2, "logprobs": True}),
    ],
    ids=["prompt-logprobs", "echo-n-2", "batch"],
)
def test_what_no_stream_can_carry_is_an_error_that_says_why(washed: str, path: str, body: JSON) -> None:
    with run_sidecar(washed) as sidecar:
        reply = send(sidecar, Call(path, {"model": "tiny", "max_tokens": 4, **body}))
    assert reply.status_code == 502
    assert reply.json()["error"]["type"] == "unscorable_logprobs"
    assert "Out of range float values are not JSON compliant" in reply.json()["error"]["message"]
