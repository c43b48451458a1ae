"""64 requests at once to a real vLLM that turns to NaN, some left midway: no reply is wrong, mixed up or short."""

import asyncio
import math

import aiohttp
import pytest
from conftest import Served
from real_vllm_traffic import JSON, clean_prompt, completion, poisoned_positions, poisoned_prompt, wash

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(900), pytest.mark.anyio]

REQUESTS = 64
TOKENS = 24


def _body(number: int) -> JSON:
    prompt = poisoned_prompt(number) if number % 2 else clean_prompt(number)
    return completion(number, prompt, max_tokens=TOKENS, ignore_eos=True).body


async def _whole(session: aiohttp.ClientSession, url: str, body: JSON) -> JSON:
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        reply: JSON = await response.json()
        return reply


async def _left(session: aiohttp.ClientSession, url: str, body: JSON) -> None:
    """A client that leaves in the middle of its stream."""
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
        assert response.status == 200
        assert (await response.content.readline()).startswith(b"data: ")
        response.close()


async def test_many_at_once(poisoned: Served) -> None:
    bodies = [_body(number) for number in range(REQUESTS)]
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        leaving = [_left(session, poisoned.sidecar, body) for body in bodies[::4]]
        staying = [body for number, body in enumerate(bodies) if number % 4]
        results = await asyncio.gather(*(_whole(session, poisoned.sidecar, body) for body in staying), *leaving)
    replies = [reply for reply in results if reply is not None]
    assert len(replies) == len(staying) == 48
    wash(poisoned.vllm)

    for body, reply in zip(staying, replies, strict=True):
        (choice,) = reply["choices"]
        values, marks = choice["logprobs"]["token_logprobs"], choice["logprobs"].get("unscorable", {})
        assert choice["prompt_token_ids"] == body["prompt"]
        assert len(choice["token_ids"]) == len(values) == TOKENS
        marked = [position for position, value in enumerate(values) if value == 9999.0]
        assert sorted(position for positions in marks.values() for position in positions) == marked
        # Side by side, vLLM computes NaN for clean sequences too, from the blocks that poisoned ones leave.
        assert set(poisoned_positions(body["prompt"], choice["token_ids"])) <= set(marked)
        assert all(value == 9999.0 or (math.isfinite(value) and -100 < value <= 0) for value in values)
