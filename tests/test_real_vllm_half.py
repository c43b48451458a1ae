"""200 requests, every other one poisoned: without the sidecar half of them fail, with it each is delivered."""

import pytest
import requests
from conftest import VllmPair
from real_vllm_traffic import (
    POISONED_TEXT,
    Call,
    chat,
    choices,
    clean_prompt,
    completion,
    marked_positions,
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
            # The repeat meets the first attempt's NaN in its block, so it samples nothing poisoned and overwrites it.
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
            assert marked_positions(choice) == bad, call
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
        assert marked_positions(choice) == bad, call
        assert choice.unscorable == ({"floor": bad} if bad else {}), call
        assert all(value > -9999.0 for value in choice.values)
        assert reply.headers.get("X-Unscorable-Tokens") == (str(len(bad)) if bad else None)
    assert served == 75
