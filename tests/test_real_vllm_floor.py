"""vLLM's Rust front end writes -9999.0 for NaN: each one at a sampled token is marked, nothing else is."""

import copy

import pytest
import requests
from conftest import Served
from real_vllm_traffic import (
    JSON,
    POISONED_TEXT,
    Call,
    chat,
    choices,
    clean_prompt,
    completion,
    poisoned_positions,
    poisoned_prompt,
    send,
    wash,
)
from vllm_env import POISONED_IDS, SERVED_NAME

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(900)]

FLOOR = -9999.0
FORCED = {str(POISONED_IDS[0]): 100}


def _generate(seed: int, prompt: list[int]) -> Call:
    sampling = {"max_tokens": 8, "temperature": 0.7, "seed": seed, "logprobs": seed % 3}
    return Call("/inference/v1/generate", {"model": SERVED_NAME, "token_ids": prompt, "sampling_params": sampling})


def _calls() -> list[Call]:
    kinds = []
    for seed in range(10):
        kinds += [
            completion(seed, logprobs=seed % 6),
            completion(seed, poisoned_prompt(seed), logprobs=seed % 6),
            completion(seed, logit_bias=FORCED, logprobs=2),
            completion(seed, logit_bias={}, max_tokens=40, logprobs=1),
            completion(seed, poisoned_prompt(seed), echo=True, logprobs=1),
            chat(seed, f"say{POISONED_TEXT}thing", top_logprobs=seed % 4),
            _generate(seed, poisoned_prompt(seed)),
            _generate(seed, clean_prompt(seed)),
        ]
    return kinds


def _expected(body: JSON) -> tuple[JSON, int]:
    """The reply with its sampled floors marked, and how many they are."""
    marked, count = copy.deepcopy(body), 0
    for choice in marked["choices"]:
        logprobs = choice["logprobs"]
        entries = logprobs.get("content")
        values = logprobs["token_logprobs"] if entries is None else [entry["logprob"] for entry in entries]
        floors = [at for at, value in enumerate(values) if value is not None and value <= FLOOR]
        for at in floors:
            if entries is None:
                values[at] = 9999.0
            else:
                entries[at]["logprob"] = 9999.0
        if floors:
            logprobs["unscorable"] = {"floor": floors}
        count += len(floors)
    return marked, count


@pytest.mark.parametrize("poisoned", ["rust"], indirect=True)
def test_every_floor_at_a_sampled_token_is_marked_and_nothing_else(poisoned: Served) -> None:
    marked, kept = 0, 0
    for call in _calls():
        direct, reply = _both(poisoned, call)
        expected, count = _expected(direct.json())
        assert _timeless(reply.json()) == _timeless(expected), call
        assert reply.headers.get("X-Unscorable-Tokens") == (str(count) if count else None)
        assert "X-Sidecar-Recovery" not in reply.headers
        marked += count
        kept += reply.text.count(str(FLOOR))
        if call.path == "/v1/completions" and not call.body.get("echo"):
            (choice,) = choices(reply)
            assert choice.unscorable.get("floor", []) == poisoned_positions(call.body["prompt"], choice.token_ids)
    assert marked > 300
    assert kept > 300  # candidates at the floor stay: nobody sampled them


@pytest.mark.parametrize("poisoned", ["rust"], indirect=True)
def test_every_floor_of_a_stream_is_marked(poisoned: Served) -> None:
    calls = [call for call in _calls() if call.path != "/inference/v1/generate" and not call.body.get("echo")][::2]
    for call in calls:
        direct, reply = (choices(sent) for sent in _both(poisoned, Call(call.path, {**call.body, "stream": True})))
        (before,), (after,) = direct, reply
        floors = [at for at, value in enumerate(before.values) if value <= FLOOR]
        assert after.values == [9999.0 if at in floors else value for at, value in enumerate(before.values)], call
        assert after.unscorable == ({"floor": floors} if floors else {})
        assert (after.token_ids, after.text, after.finish_reason) == (
            before.token_ids,
            before.text,
            before.finish_reason,
        )


def _both(served: Served, call: Call) -> tuple[requests.Response, requests.Response]:
    replies = []
    for url in (served.vllm, served.sidecar):
        wash(served.vllm)
        replies.append(send(url, call, **{"X-Request-Id": "floor"}))
        assert replies[-1].status_code == 200, replies[-1].text
    return replies[0], replies[1]


def _timeless(body: JSON) -> JSON:
    return {**body, "created": None}
