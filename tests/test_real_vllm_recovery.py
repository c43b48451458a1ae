"""What real vLLM fails to write, the sidecar still delivers: half of the traffic poisoned, and each way to heal it."""

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
    Choice,
    chat,
    choices,
    clean_prompt,
    completion,
    poisoned_positions,
    poisoned_prompt,
    send,
    wash,
)
from servers import run_sidecar
from vllm_env import POISONED_IDS

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(900)]

REQUESTS = 200
MOST_CHOICES = 9
FORCED = {str(POISONED_IDS[0]): 100}  # the first sampled token is poisoned, so that all but the first are unscorable

EVERY = [{"role": "user", "content": POISONED_TEXT}]


def _calls() -> list[Call]:
    """Every other request is poisoned: in its prompts, in its conversation, or by its own first token."""
    return [_poisoned_call(seed) if seed % 2 else _clean_call(seed) for seed in range(REQUESTS)]


def _poisoned_call(seed: int) -> Call:
    n = 1 + seed // 2 % 3
    match seed // 2 % 5:
        case 0:
            return completion(seed, poisoned_prompt(seed), logprobs=1)
        case 1:
            return completion(seed, poisoned_prompt(seed), n=n)
        case 2:
            # The clean prompts are the longer ones: the attempts before the stream leave NaN in freed cache blocks, and
            # vLLM computes NaN for a sequence that is given such a block and does not overwrite all of it.
            prompts = [clean_prompt(seed, length=40), poisoned_prompt(seed), clean_prompt(seed + 1000, length=40)]
            return completion(seed, prompts, n=n)
        case 3:
            return completion(seed, logit_bias=FORCED, n=n)
        case _:
            return chat(seed, f"tell{POISONED_TEXT}one", n=n, top_logprobs=seed % 3)


def _clean_call(seed: int) -> Call:
    n = 1 + seed // 2 % 3
    match seed // 2 % 3:
        case 0:
            return completion(seed, n=n, logprobs=seed % 4)
        case 1:
            return completion(seed, [clean_prompt(seed), clean_prompt(seed + 1000)], n=n)
        case _:
            return chat(seed, n=n, top_logprobs=seed % 3)


def _prompts(call: Call, reply: requests.Response) -> list[list[int]]:
    """The token ids that each choice continues."""
    if "messages" in call.body:
        prompts = [reply.json()["prompt_token_ids"]]
    else:
        prompts = call.body["prompt"] if isinstance(call.body["prompt"][0], list) else [call.body["prompt"]]
    return [prompt for prompt in prompts for _ in range(call.body.get("n", 1))]


def _marked(choice: Choice) -> list[int]:
    return [position for position, value in enumerate(choice.values) if value == 9999.0]


def _run(url: str, calls: list[Call], vllm: str, sequences: int) -> list[requests.Response]:
    """Sends the calls one by one, each to an engine in which no earlier one has left NaN."""
    wash(vllm, sequences)
    replies = []
    for seed, call in enumerate(calls):
        replies.append(send(url, call))
        if seed % 2:
            wash(vllm, sequences)
    return replies


def test_half_of_the_traffic_poisoned(vllm_poison: VllmPair) -> None:
    vllm, calls = vllm_poison.python.url, _calls()
    streamed = _run(vllm, [Call(call.path, {**call.body, "stream": True}) for call in calls], vllm, MOST_CHOICES)
    without = [send(vllm, call) for call in calls]
    assert sum(reply.status_code == 400 for reply in without) >= REQUESTS / 2

    with run_sidecar(vllm, trip_ratio=0) as sidecar:
        replies = _run(sidecar, calls, vllm, MOST_CHOICES)
    assert [reply.status_code for reply in replies] == [200] * REQUESTS
    for seed, (call, reply, stream) in enumerate(zip(calls, replies, streamed, strict=True)):
        marks = 0
        for prompt, choice, same in zip(_prompts(call, reply), choices(reply), choices(stream), strict=True):
            bad = poisoned_positions(prompt, choice.token_ids)
            assert _marked(choice) == bad, call
            assert choice.unscorable == ({"nan": bad} if bad else {}), call
            assert choice.token_ids == same.token_ids, call
            assert choice.finish_reason == same.finish_reason
            assert choice.values == [9999.0 if value is None else value for value in same.values], call
            marks += len(bad)
        assert (marks > 0) == bool(seed % 2)
        assert reply.headers.get("X-Unscorable-Tokens") == (str(marks) if marks else None)
        assert reply.headers.get("X-Sidecar-Recovery") == ("stream" if marks else None)


def test_half_of_the_traffic_poisoned_at_the_rust_front_end(vllm_poison: VllmPair) -> None:
    vllm, calls = vllm_poison.rust.url, _calls()
    with run_sidecar(vllm, trip_ratio=0) as sidecar:
        replies = _run(sidecar, calls, vllm, 1)
    served = 0
    for call, reply in zip(calls, replies, strict=True):
        assert "X-Sidecar-Recovery" not in reply.headers
        if call.body.get("n", 1) > 1 or isinstance(call.body.get("prompt", [0])[0], list):
            assert reply.status_code == 400  # more than one choice is more than this front end does
            continue
        served += 1
        (choice,), (prompt,) = choices(reply), _prompts(call, reply)
        bad = poisoned_positions(prompt, choice.token_ids)
        assert _marked(choice) == bad, call
        assert choice.unscorable == ({"floor": bad} if bad else {}), call
        assert all(value > -9999.0 for value in choice.values)
        assert reply.headers.get("X-Unscorable-Tokens") == (str(len(bad)) if bad else None)
    assert served == 75


@pytest.fixture
def washed(vllm_poison: VllmPair) -> Iterator[str]:
    """The Python server, without NaN in its free cache blocks."""
    wash(vllm_poison.python.url, MOST_CHOICES)
    yield vllm_poison.python.url
    wash(vllm_poison.python.url, MOST_CHOICES)


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
    assert _marked(choice) == choice.unscorable["nan"] == list(range(len(choice.token_ids)))
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
