"""Requests for the tiny models, and what of a reply can be compared between two runs with the same seed.

Prompts are token ids and chats have no generation prompt, so that the poisoned model meets a poisoned id only where a
request puts one: the ids of "assistant" hold one. `logit_bias` keeps it from sampling one by itself.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import requests
from vllm_env import POISONED_IDS, SERVED_NAME

CLEAN_IDS = range(5, 290)
NO_POISON = {str(token_id): -100 for token_id in POISONED_IDS}
POISONED_TEXT = " every"  # one token, id 303
JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    path: str
    body: JSON


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a reply, whole or gathered from its chunks; `values` are the sampled tokens' logprobs as sent."""

    token_ids: list[int]
    values: list[Any]
    unscorable: Mapping[str, list[int]]
    text: str
    finish_reason: str | None


def completion(seed: int, prompt: Any = None, **body: Any) -> Call:
    made = {"prompt": prompt or clean_prompt(seed), "logprobs": 0, **_common(seed), **body}
    return Call("/v1/completions", made)


def chat(seed: int, content: str = "", **body: Any) -> Call:
    said = content or random.Random(seed).choice(["QZ", "1+1=2", "Who?", "x y z", "[]"])
    # A role of its own name: "assistant", which the template would open a reply with, holds a poisoned id.
    asked = {"messages": [{"role": "user", "content": said}], "add_generation_prompt": False, "logprobs": True}
    return Call("/v1/chat/completions", {**asked, **_common(seed), **body})


def _common(seed: int) -> JSON:
    sampling = {"model": SERVED_NAME, "max_tokens": 8, "temperature": 1.0, "seed": seed, "logit_bias": NO_POISON}
    return {**sampling, "return_token_ids": True}


def clean_prompt(seed: int, length: int | None = None) -> list[int]:
    chosen = random.Random(seed)
    return chosen.choices(CLEAN_IDS, k=length or chosen.randint(3, 12))


def poisoned_prompt(seed: int) -> list[int]:
    prompt = clean_prompt(seed)
    prompt[1 + seed % (len(prompt) - 1)] = POISONED_IDS[seed % len(POISONED_IDS)]
    return prompt


def send(base_url: str, call: Call, **headers: str) -> requests.Response:
    return requests.post(base_url + call.path, json=call.body, headers=headers, timeout=120)


def choices(reply: requests.Response) -> list[Choice]:
    """The choices by index, from a whole reply or from a stream, which must have ended with [DONE]."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return [_gathered([choice]) for choice in sorted(reply.json()["choices"], key=lambda one: one["index"])]
    parts: dict[int, list[JSON]] = {}
    for chunk in events(reply):
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return [_gathered(parts[index]) for index in sorted(parts)]


def events(reply: requests.Response) -> list[JSON]:
    data = [line.removeprefix(b"data: ") for line in reply.content.split(b"\n") if line.startswith(b"data: ")]
    assert data[-1] == b"[DONE]", reply.text
    return [json.loads(event) for event in data[:-1]]


def _gathered(parts: list[JSON]) -> Choice:
    token_ids: list[int] = []
    values: list[Any] = []
    unscorable: dict[str, list[int]] = {}
    text = ""
    for part in parts:
        logprobs = part.get("logprobs") or {}
        for reason, positions in logprobs.get("unscorable", {}).items():
            unscorable.setdefault(reason, []).extend(len(values) + position for position in positions)
        if "content" in logprobs:
            values += [entry.get("logprob") for entry in logprobs["content"] or []]
        else:
            values += logprobs.get("token_logprobs", [])
        token_ids += part.get("token_ids") or []
        message = part.get("message") or part.get("delta") or {}
        text += part.get("text") or message.get("content") or ""
    return Choice(token_ids, values, unscorable, text, parts[-1]["finish_reason"])


def poisoned_positions(prompt_ids: list[int], token_ids: list[int]) -> list[int]:
    """The sampled positions with a poisoned id anywhere before them: what the model cannot have a logprob for."""
    before = [*prompt_ids, *token_ids]
    start = len(prompt_ids)
    return [at for at in range(len(token_ids)) if any(token_id in POISONED_IDS for token_id in before[: start + at])]


def marked_positions(choice: Choice) -> list[int]:
    return [position for position, value in enumerate(choice.values) if value == 9999.0]


def wash(vllm_url: str, sequences: int = 1) -> None:
    """Overwrites what poisoned requests left in freed cache blocks, which makes the next clean one NaN on this engine.

    `sequences` is how many choices the poisoned request had in all: that many blocks were freed, and are used again.
    """
    # Nearly a block each, and enough steps that all are at work at once, whenever they reached the engine.
    prompts = [clean_prompt(seed, length=110) for seed in range(sequences)]
    asked = {"logprobs": None, "max_tokens": 12, "ignore_eos": True} if sequences > 1 else {"logprobs": None}
    reply = send(vllm_url, completion(0, prompts if sequences > 1 else prompts[0], **asked))
    assert reply.status_code == 200, reply.text
