"""Clients that nobody here wrote, through the sidecar to a real vLLM whose logprobs are NaN."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest
import requests
from conftest import Served
from real_vllm_traffic import JSON, chat, completion, poisoned_positions, poisoned_prompt, send, wash
from servers import run_sidecar
from vllm_env import SERVED_NAME

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(900)]

REASON = {"python": "nan", "rust": "floor"}
RECOVERY = {"python": "stream", "rust": None}
WRITTEN = {"ceiling": 9999.0, "literal": math.nan, "string": "NaN", "null": None}
TOKENS = 8
EVERY = list(range(TOKENS))


@pytest.fixture(autouse=True)
def _washed(poisoned: Served) -> Iterator[None]:
    yield
    wash(poisoned.vllm)


def _same(value: Any, written: Any) -> bool:
    return value == written or (isinstance(written, float) and math.isnan(written) and math.isnan(value))


def _trl_payload(prompt: list[int], seed: int) -> JSON:
    """What TRL 1.16's rollout worker sends for one turn."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "n": 1}
    wanted = {"return_token_ids": True, "logprobs": 0, "seed": seed}
    return {"model": SERVED_NAME, "prompt": prompt, "max_tokens": TOKENS, **sampling, **wanted}


async def _trl_post(session: aiohttp.ClientSession, url: str, payload: JSON) -> JSON:
    """How it sends it: any status but 2xx is an exception, and the body is what aiohttp makes of it."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with session.post(f"{url}/v1/completions", json=payload, timeout=timeout) as response:
        response.raise_for_status()
        content = await response.json()
        return content if content else {}


@pytest.mark.anyio
async def test_the_way_trl_posts(poisoned: Served) -> None:
    prompts = [poisoned_prompt(number) for number in range(16)]
    seeds = [2**62 + number for number in range(16)]  # 63 bits, as TRL draws them: no double holds them
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=16)) as session:
        payloads = [_trl_payload(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        outputs = await asyncio.gather(*(_trl_post(session, poisoned.sidecar, payload) for payload in payloads))
    for prompt, output in zip(prompts, outputs, strict=True):
        choice = output["choices"][0]
        values = choice["logprobs"]["token_logprobs"]
        assert len(choice["token_ids"]) == len(values) == TOKENS
        assert values == [9999.0] * TOKENS
        assert choice["logprobs"]["unscorable"] == {REASON[poisoned.front_end]: EVERY}
        assert poisoned_positions(prompt, choice["token_ids"]) == EVERY


@pytest.mark.anyio
@pytest.mark.parametrize("encoding", ["string", "null"])
async def test_the_way_trl_posts_to_a_url_with_a_prefix(poisoned: Served, encoding: str) -> None:
    async with aiohttp.ClientSession() as session:
        output = await _trl_post(session, f"{poisoned.sidecar}/nan/{encoding}", _trl_payload(poisoned_prompt(1), 1))
    assert output["choices"][0]["logprobs"]["token_logprobs"] == [WRITTEN[encoding]] * TOKENS


@pytest.mark.parametrize("encoding", WRITTEN)
def test_requests_chooses_the_encoding_by_prefix_or_header(poisoned: Served, encoding: str) -> None:
    call = completion(3, poisoned_prompt(3), max_tokens=TOKENS)
    by_prefix = send(f"{poisoned.sidecar}/nan/{encoding}", call)
    by_header = send(poisoned.sidecar, call, **{"X-Nan-Encoding": encoding})
    over_both = send(f"{poisoned.sidecar}/nan/ceiling", call, **{"X-Nan-Encoding": encoding})
    for reply in (by_prefix, by_header, over_both):
        assert reply.status_code == 200
        assert reply.headers["X-Unscorable-Tokens"] == str(TOKENS)
        assert reply.headers.get("X-Sidecar-Recovery") == RECOVERY[poisoned.front_end]
        logprobs = reply.json()["choices"][0]["logprobs"]
        assert len(logprobs["token_logprobs"]) == TOKENS
        assert all(_same(value, WRITTEN[encoding]) for value in logprobs["token_logprobs"])
        assert logprobs["unscorable"] == {REASON[poisoned.front_end]: EVERY}


def test_requests_gets_a_refusal_for_an_unknown_encoding(poisoned: Served) -> None:
    call = completion(3, poisoned_prompt(3))
    for reply in (
        send(f"{poisoned.sidecar}/nan/zero", call),
        send(poisoned.sidecar, call, **{"X-Nan-Encoding": "zero"}),
    ):
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert all(encoding in error["message"] for encoding in WRITTEN)


def test_the_setting_chooses_the_encoding(poisoned: Served) -> None:
    with run_sidecar(poisoned.vllm, nan_encoding="null") as sidecar:
        reply = requests.post(f"{sidecar}/v1/completions", json=_trl_payload(poisoned_prompt(5), 5), timeout=60)
    assert reply.json()["choices"][0]["logprobs"]["token_logprobs"] == [None] * TOKENS


def _openai_completion(seed: int) -> JSON:
    body = completion(seed, poisoned_prompt(seed), max_tokens=TOKENS).body
    extra = {"return_token_ids": body.pop("return_token_ids")}
    return {**body, "extra_body": extra}


def _openai_chat(seed: int) -> JSON:
    body = chat(seed, "all of every", max_tokens=TOKENS).body
    extra = {name: body.pop(name) for name in ("return_token_ids", "add_generation_prompt")}
    return {**body, "extra_body": extra}


def test_openai_sdk(poisoned: Served) -> None:
    with openai.OpenAI(base_url=f"{poisoned.sidecar}/v1", api_key="none", max_retries=0) as client:
        logprobs = client.completions.create(**_openai_completion(7)).choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs == [9999.0] * TOKENS
        assert (logprobs.model_extra or {})["unscorable"] == {REASON[poisoned.front_end]: EVERY}

        said = client.chat.completions.create(**_openai_chat(7)).choices[0].logprobs
        assert said is not None and said.content is not None
        assert [entry.logprob for entry in said.content] == [9999.0] * TOKENS
        assert (said.model_extra or {})["unscorable"] == {REASON[poisoned.front_end]: EVERY}


def test_openai_sdk_streamed(poisoned: Served) -> None:
    with openai.OpenAI(base_url=f"{poisoned.sidecar}/v1", api_key="none", max_retries=0) as client:
        values: list[float] = []
        for chunk in client.completions.create(**_openai_completion(8), stream=True):
            if chunk.choices and chunk.choices[0].logprobs:
                values += chunk.choices[0].logprobs.token_logprobs or []
        assert values == [9999.0] * TOKENS

        said: list[float] = []
        for event in client.chat.completions.create(**_openai_chat(8), stream=True):
            if event.choices and event.choices[0].logprobs:
                said += [entry.logprob for entry in event.choices[0].logprobs.content or []]
        assert said == [9999.0] * TOKENS


@pytest.mark.anyio
async def test_openai_sdk_async(poisoned: Served) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{poisoned.sidecar}/nan/string/v1", api_key="none", max_retries=0
    ) as client:
        # The SDK's models hold floats: they turn the string back into one.
        whole = await client.completions.create(**_openai_completion(9))
        assert whole.choices[0].logprobs is not None
        assert [str(value) for value in whole.choices[0].logprobs.token_logprobs or []] == ["nan"] * TOKENS

        values: list[Any] = []
        async for chunk in await client.completions.create(**_openai_completion(9), stream=True):
            if chunk.choices and chunk.choices[0].logprobs:
                values += chunk.choices[0].logprobs.token_logprobs or []
        assert [str(value) for value in values] == ["nan"] * TOKENS
