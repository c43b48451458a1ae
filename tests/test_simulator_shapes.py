"""The simulator's replies have the shapes of real vLLM's: keys, their order, JSON types, event kinds, content type."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fixtures_index import RUST_SERVER, Fixture, ids, load_fixtures

from proxy.simulator import FrontEnd, SimulatorConfig, create_simulator

# What the stand-in leaves out, and why.
LEFT_OUT = {
    "all_details": "server flags add details and metrics",
    "processed": "the same: they hold those details",
    "neginf": "the same",
    "interval5_forced_usage": "server flags change every chunk",
    "tool": "tool calls",
    "chat_clean_echo": "chat echo",
    "engine_dead": "a dead engine: see test_simulator.py",
    "race_error": "a race in vLLM",
    "abort_partial": "needs a pause in flight: see test_simulator.py",
    "keepalive": "the same",
    "stream_true": "chat batch with stream: vLLM loses tokens",
    "messages": "no logprobs there",
    "scoring": "no logprobs there",
    "logit_bias_refused": "a quirk of one parser",
    "scaleout_disabled": "a server flag",
}
SPECIAL = {
    "completions_nan_contaminated_next_request_http400": {"stale_block": 1},
    "completions_nan_midresponse_http400": {"stale_block": 1},
    "completions_nan_midresponse_stream": {"nan_persistent": 1.0},
    "responses_nan_midresponse_http": {"nan_rate": 1.0},
    "rust_completions_nan_midresponse_sampled": {"nan_persistent": 1.0},
    "rust_completions_nan_midresponse_sampled_stream": {"nan_persistent": 1.0},
    "rust_generate_nan_midresponse_sampled": {"nan_persistent": 1.0},
    "rust_generate_nan_midresponse_sampled_stream": {"nan_persistent": 1.0},
    "rust_chat_nan": {"poisoned_token_ids": (74,)},  # the "h" of "hi"
    "rust_chat_nan_stream": {"poisoned_token_ids": (74,)},
}
STOP = " world"  # the third token of the simulator's own greedy reply


def covered() -> list[Fixture]:
    return [f for f in load_fixtures() if not any(part in f.name + "." for part in LEFT_OUT)]


def shape(value: Any, key: str = "") -> Any:
    """Keys in order, and types; a list is its entries' shapes as a set, an object keyed by token its values'."""
    if key == "bytes":
        return "bytes"
    if isinstance(value, list):
        return ("list", frozenset(shape(entry, key) for entry in value))
    if isinstance(value, dict):
        if key in ("top_logprobs", "prompt_logprobs") and "logprob" not in value:
            return ("map", frozenset(shape(entry) for entry in value.values()))
        return tuple((name, shape(entry, name)) for name, entry in value.items())
    return type(value).__name__


def event_kinds(body: bytes) -> dict[Any, list[Any]]:
    """Fields and data shape of each event, by choice (their interleaving is chance); runs of one kind count once."""
    assert body.endswith(b"\n\n")
    kinds: dict[Any, list[Any]] = {}
    for event in body.removesuffix(b"\n\n").split(b"\n\n"):
        fields = [line.partition(b": ") for line in event.split(b"\n")]
        data = None if fields[-1][2] == b"[DONE]" else json.loads(fields[-1][2])
        choice = data["choices"][0]["index"] if data is not None and data.get("choices") else None
        kind = [name for name, _, _ in fields], shape(data)
        if kind not in kinds.setdefault(choice, [])[-1:]:
            kinds[choice].append(kind)
    return kinds


async def ask(fixture: Fixture) -> httpx.Response:
    config = SimulatorConfig(
        model="tiny", front_end=FrontEnd.RUST if fixture.server == RUST_SERVER else FrontEnd.PYTHON
    )
    app = create_simulator(replace(config, **SPECIAL.get(fixture.name, {})))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sim") as client:
        method, path = fixture.request["method"], fixture.request["path"]
        headers = fixture.request["headers"]
        content = fixture.request_body
        if "stop_string" in fixture.name and "nan" not in fixture.name:
            content = json.dumps(fixture.request["body"] | {"stop": [STOP]}).encode()
        return await client.request(method, path, content=content, headers=headers)


@pytest.mark.anyio
@pytest.mark.parametrize("fixture", covered(), ids=ids(covered()))
async def test_shape_of_a_reply(fixture: Fixture) -> None:
    reply = await ask(fixture)
    assert reply.status_code == fixture.status
    assert reply.headers["content-type"] == dict(fixture.headers)["content-type"]
    if fixture.streamed:
        assert event_kinds(reply.content) == event_kinds(fixture.body)
    else:
        assert shape(reply.json()) == shape(json.loads(fixture.body))


REFUSED = [
    f
    for f in covered()
    if f.status >= 400
    and not f.name.startswith("rust_completions_prompt")
    and "json" not in f.name
    and "missing" not in f.name
]


@pytest.mark.anyio
@pytest.mark.parametrize("fixture", REFUSED, ids=ids(REFUSED))
async def test_an_error_is_word_for_word(fixture: Fixture) -> None:
    assert (await ask(fixture)).content == fixture.body


def test_most_fixtures_are_covered() -> None:
    assert len(covered()) == 136
