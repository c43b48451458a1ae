"""The stand-in as a real server: aborts, pauses, faults, streams, control calls. Nothing here sleeps."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from servers import run_app

from proxy.simulator import FrontEnd, SimulatorConfig, create_simulator
from proxy.simulator.control import Engine

PROMPT = [10, 11, 12]
NON_COMPLIANT = (
    b'{"error":{"message":"Out of range float values are not JSON compliant",'
    b'"type":"BadRequestError","param":null,"code":400}}'
)
SLOW = 0.005
BOTH = pytest.mark.parametrize("front_end", list(FrontEnd))
ENDLESS = {"prompt": PROMPT, "max_tokens": 8000, "logprobs": 0, "return_token_ids": True, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1, "return_token_ids": True}


@asynccontextmanager
async def simulator(**options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    app = create_simulator(SimulatorConfig(**options))
    async with run_app(app) as url, httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        yield client, app.state.engine


async def events(reply: httpx.Response) -> AsyncIterator[Any]:
    """The data of each event; `[DONE]` as None."""
    buffer = b""
    async for piece in reply.aiter_bytes():
        *whole, buffer = (buffer + piece).split(b"\n\n")
        for event in whole:
            data = event.rpartition(b"data: ")[2]
            yield None if data == b"[DONE]" else json.loads(data)
    assert buffer == b""


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    async with client.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200
        return [event async for event in events(reply)]


def folded(chunks: list[Any], choice: int = 0) -> dict[str, list[Any]]:
    """One choice of a completions stream, put together by hand."""
    parts = [c["choices"][0] for c in chunks if c and c["choices"] and c["choices"][0]["index"] == choice]
    return {
        "text": "".join(part["text"] for part in parts),
        "token_ids": [i for part in parts for i in part["token_ids"]],
        "token_logprobs": [v for part in parts for v in part["logprobs"]["token_logprobs"]],
        "text_offset": [v for part in parts for v in part["logprobs"]["text_offset"]],
        "top_logprobs": [v for part in parts for v in part["logprobs"]["top_logprobs"]],
        "finish_reason": parts[-1]["finish_reason"],
    }


@pytest.mark.anyio
async def test_streamed_and_whole_replies_hold_the_same() -> None:
    body = {"prompt": [PROMPT, [20, 21]], "n": 2, "max_tokens": 40, "logprobs": 2, "seed": 3, "return_token_ids": True}
    async with simulator() as (client, _):
        whole = (await client.post("/v1/completions", json=body)).json()["choices"]
        chunks = await stream(client, "/v1/completions", body)
    assert [choice["index"] for choice in whole] == [0, 1, 2, 3]
    for choice in whole:
        kept = {key: choice[key] for key in ("text", "token_ids", "finish_reason")}
        kept |= {key: choice["logprobs"][key] for key in ("token_logprobs", "text_offset", "top_logprobs")}
        assert folded(chunks, choice["index"]) == kept
    assert len({tuple(choice["token_ids"]) for choice in whole}) == 4


@pytest.mark.anyio
async def test_streamed_and_whole_chats_hold_the_same() -> None:
    async with simulator() as (client, _):
        whole = (await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 30, "seed": 3})).json()
        chunks = await stream(client, "/v1/chat/completions", CHAT | {"max_tokens": 30, "seed": 3})
    parts = [chunk["choices"][0] for chunk in chunks if chunk]
    choice = whole["choices"][0]
    assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
    assert [e for part in parts[1:] for e in part["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert [i for part in parts[1:] for i in part["token_ids"]] == choice["token_ids"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


@pytest.mark.anyio
@BOTH
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_aborts_its_request(front_end: FrontEnd, streamed: bool) -> None:
    async with simulator(latency_per_token=SLOW, front_end=front_end) as (client, engine):
        call = asyncio.create_task(client.post("/v1/completions", json=ENDLESS | {"stream": streamed}))
        await engine.until(lambda: engine.running == 1)
        call.cancel()
        await engine.until(lambda: engine.running == 0)
        assert engine.finished["abort"] == 1
        assert engine.generation_tokens < 1000


@pytest.mark.anyio
async def test_pause_keep_freezes_and_resume_finishes() -> None:
    body = ENDLESS | {"max_tokens": 60}
    async with simulator(latency_per_token=SLOW) as (client, engine):
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        await engine.until(lambda: engine.running == 1)
        assert (await client.post("/pause?mode=keep")).json() == {"status": "paused"}
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        frozen = engine.generation_tokens
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as late:
            assert late.status_code == 200  # the headers come before the engine admits it
            await engine.until(lambda: engine.waiting == 1)
            assert (await client.get("/health")).status_code == 200
            assert engine.generation_tokens == frozen
            assert not call.done()
            assert (await client.post("/resume")).json() == {"status": "resumed"}
            chunks = [event async for event in events(late)]
        choice = (await call).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 60
    assert folded(chunks)["token_ids"] == choice["token_ids"]


@pytest.mark.anyio
@BOTH
async def test_pause_abort_returns_what_there_is(front_end: FrontEnd) -> None:
    async with simulator(latency_per_token=SLOW, front_end=front_end) as (client, engine):
        call = asyncio.create_task(client.post("/v1/completions", json=ENDLESS))
        await engine.until(lambda: engine.running == 1)
        await client.get("/health")
        await client.post("/pause")
        reply = await call
        assert reply.status_code == 200
        choice = reply.json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) == engine.generation_tokens
        late = asyncio.create_task(client.post("/v1/completions", json=ENDLESS | {"max_tokens": 2}))
        await engine.until(lambda: engine.waiting == 1)
        await client.post("/resume")
        assert len((await late).json()["choices"][0]["token_ids"]) == 2


@pytest.mark.anyio
@BOTH
async def test_a_stream_that_pause_aborts(front_end: FrontEnd) -> None:
    async with simulator(latency_per_token=SLOW, front_end=front_end) as (client, engine):
        call = asyncio.create_task(stream(client, "/v1/completions", ENDLESS))
        await engine.until(lambda: engine.running == 1)
        await client.post("/pause?mode=keep")
        await client.post("/pause?mode=abort")
        *_, last, done = await call
    assert done is None
    if front_end is FrontEnd.RUST:
        assert last["error"]["message"] == "completion stream requested logprobs but generation returned none"
    else:
        assert last["choices"][0] == {
            "index": 0,
            "text": "",
            "logprobs": {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []},
            "finish_reason": "abort",
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": [],
        } | ({"prompt_token_ids": PROMPT} if engine.generation_tokens == 0 else {})


@pytest.mark.anyio
async def test_pause_wait_returns_when_all_have_ended() -> None:
    async with simulator(latency_per_token=SLOW) as (client, engine):
        call = asyncio.create_task(client.post("/v1/completions", json=ENDLESS | {"max_tokens": 20}))
        await engine.until(lambda: engine.running == 1)
        await client.post("/pause?mode=wait")
        assert engine.running == 0
        assert engine.paused
        assert len((await call).json()["choices"][0]["token_ids"]) == 20


NAN = {"prompt": PROMPT, "max_tokens": 4, "seed": 1, "logprobs": 1, "return_token_ids": True}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", NAN),
        ("/v1/completions", NAN | {"prompt": [20, 21, 22], "echo": True}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 4}),
        ("/invocations", NAN),
    ],
    ids=["completions", "echo", "chat", "invocations"],
)
async def test_nan_breaks_a_whole_reply_every_time(path: str, body: dict[str, Any]) -> None:
    async with simulator() as (client, _):
        for _ in range(2):
            reply = await client.post(path, json=body | {"seed": 1, "vllm_xargs": {"nan_at": [2]}})
            assert (reply.status_code, reply.content) == (400, NON_COMPLIANT)
        assert len(NON_COMPLIANT) == 121


@pytest.mark.anyio
async def test_nan_streams_as_null_where_it_is() -> None:
    async with simulator() as (client, _):
        clean = (await client.post("/v1/completions", json=NAN)).json()["choices"][0]
        chunks = await stream(client, "/v1/completions", NAN | {"vllm_xargs": {"nan_at": [2]}})
    got = folded(chunks)
    assert got["token_ids"] == clean["token_ids"]
    assert got["text"] == clean["text"]
    expected = clean["logprobs"]["token_logprobs"]
    assert got["token_logprobs"] == [expected[0], expected[1], None, expected[3]]
    assert set(got["top_logprobs"][2].values()) == {None}


@pytest.mark.anyio
async def test_nan_without_logprobs_is_hidden() -> None:
    async with simulator() as (client, _):
        body = {"prompt": [10, 300, 12], "max_tokens": 3, "return_token_ids": True}
        reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["token_ids"] == [0, 0, 0]


@pytest.mark.anyio
async def test_the_rust_server_writes_the_floor() -> None:
    async with simulator(front_end=FrontEnd.RUST) as (client, _):
        reply = await client.post("/v1/completions", json=NAN | {"vllm_xargs": {"nan_at": [2]}})
    assert reply.status_code == 200
    values = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert [i for i, value in enumerate(values) if value == -9999.0] == [2]
    assert all(len(repr(value)) <= 12 for value in values)


@pytest.mark.anyio
async def test_older_servers_answer_500() -> None:
    async with simulator(nan_status=500) as (client, _):
        reply = await client.post("/v1/completions", json=NAN | {"vllm_xargs": {"nan_at": [0]}})
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "Out of range float values are not JSON compliant"


@pytest.mark.anyio
async def test_a_step_without_logprobs() -> None:
    order = {"max_tokens": 3, "vllm_xargs": {"missing_at": [1]}}
    async with simulator() as (client, _):
        whole = (await client.post("/v1/completions", json=NAN | order)).json()["choices"][0]["logprobs"]
        chunks = folded(await stream(client, "/v1/completions", NAN | order))
        chat = (await client.post("/v1/chat/completions", json=CHAT | order)).json()["choices"][0]["logprobs"]
        deltas = await stream(client, "/v1/chat/completions", CHAT | order | {"seed": 1})
        generate = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3, "logprobs": 0}} | order
        tokens = (await client.post("/inference/v1/generate", json=generate)).json()["choices"][0]["logprobs"]
    assert whole["token_logprobs"][1] is chunks["token_logprobs"][1] is None
    assert whole["top_logprobs"][1] is chunks["top_logprobs"][1] is None
    assert chat["content"][1]["logprob"] == tokens["content"][1]["logprob"] == -9999.0
    assert chat["content"][1]["top_logprobs"] == []
    assert list(deltas[2]["choices"][0]["logprobs"]["content"][0]) == ["token", "bytes"]


@pytest.mark.anyio
async def test_a_floor_is_finite_and_passes() -> None:
    async with simulator() as (client, _):
        reply = await client.post("/v1/completions", json=NAN | {"vllm_xargs": {"floor_at": [1, 3]}})
    values = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert [i for i, value in enumerate(values) if value == -9999.0] == [1, 3]


@pytest.mark.anyio
async def test_a_poisoned_prefix_fails_until_a_fresh_salt_or_a_reset() -> None:
    async with simulator(poisoned_prefix=(10, 11)) as (client, _):

        async def status(**fields: Any) -> int:
            return (await client.post("/v1/completions", json=NAN | fields)).status_code

        assert [await status(), await status()] == [400, 400]
        assert [await status(cache_salt="a"), await status(), await status(prompt=[11, 10])] == [200, 400, 200]
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        assert await status() == 200


@pytest.mark.anyio
async def test_a_stale_block_fails_once() -> None:
    async with simulator(stale_block=2) as (client, _):
        statuses = [(await client.post("/v1/completions", json=NAN)).status_code for _ in range(4)]
    assert statuses == [400, 400, 200, 200]


@pytest.mark.anyio
@BOTH
async def test_a_dead_engine(front_end: FrontEnd) -> None:
    body = NAN | {"vllm_xargs": {"die_at": 2}}
    async with simulator(front_end=front_end) as (client, _):
        assert (await client.post("/v1/completions", json=body)).status_code == 500
        whole = (await client.post("/v1/completions", json=NAN)).json()["choices"][0]["token_ids"]
        *tokens, error, done = await stream(client, "/v1/completions", body)
    assert [i for part in tokens for i in part["choices"][0]["token_ids"]] == whole[:2]
    assert error["error"]["code"] == (500 if front_end is FrontEnd.PYTHON else "server_error")
    assert done is None


@pytest.mark.anyio
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_cut_connection_is_no_clean_end(streamed: bool) -> None:
    async with simulator() as (client, _):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", json=NAN | {"vllm_xargs": {"cut_at": 2}, "stream": streamed})


@pytest.mark.anyio
async def test_responses_streamed_and_whole_agree() -> None:
    body = {"input": "hi", "max_output_tokens": 20, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body |= {"seed": 5}
    async with simulator() as (client, _):
        whole = (await client.post("/v1/responses", json=body)).json()
        chunks = await stream(client, "/v1/responses", body)
    completed = chunks[-1]["response"]
    assert [chunk["sequence_number"] for chunk in chunks] == list(range(len(chunks)))
    assert completed["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"]
    assert completed["usage"] == whole["usage"]
    deltas = [chunk for chunk in chunks if chunk["type"] == "response.output_text.delta"]
    streamed = [entry["logprob"] for delta in deltas for entry in delta["logprobs"]]
    kept = [entry["logprob"] for entry in completed["output"][0]["content"][0]["logprobs"]]
    assert streamed == kept
    assert len(whole["output"][0]["content"][0]["logprobs"]) == 20


@pytest.mark.anyio
async def test_metrics_and_counted_calls() -> None:
    calls = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    async with simulator() as (client, _):
        await client.post("/v1/completions", json=ENDLESS | {"max_tokens": 8000, "n": 2}, headers={"X-Request-Id": "a"})
        for call in [*calls, "/pause?mode=keep", "/resume"]:
            assert (await client.post(call, json={"update_info": {}})).status_code == 200
        assert (await client.get("/get_world_size")).json() == {"world_size": 1}
        text = (await client.get("/metrics")).text
        seen = (await client.get("/simulator/calls")).json()
    labels = 'engine="0",model_name="sim"'
    for name, value in (
        ("generation_tokens_total", 16000.0),
        ("prompt_tokens_total", 3.0),
        ("num_requests_running", 0.0),
    ):
        assert f"vllm:{name}{{{labels}}} {value}\n" in text
    assert f'vllm:request_success_total{{{labels},finished_reason="length"}} 2.0\n' in text
    assert seen["counts"] == {f"POST {call.partition('?')[0]}": 1 for call in [*calls, "/pause", "/resume"]} | {
        "POST /v1/completions": 1,
        "GET /get_world_size": 1,
        "GET /metrics": 1,
    }
    assert json.loads(seen["recent"][0]["body"])["n"] == 2
    assert ["x-request-id", "a"] in seen["recent"][0]["headers"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"prompt":[10,', 400, "JSON decode error"),
        (b'{"model":"other","prompt":[10]}', 404, "The model `other` does not exist."),
        (
            b'{"prompt":[10],"logprobs":21}',
            400,
            "Requested sample logprobs of 21, which is greater than max allowed: 20",
        ),
        (b'{"prompt":[512]}', 400, "Token id 512 is out of vocabulary"),
        (b'{"prompt":[10],"max_tokens":"x"}', 400, "body.max_tokens"),
        (b'{"prompt":[10],"logit_bias":5}', 400, "validation error"),
        (b'{"prompt":[10],"max_tokens":9000}', 400, "maximum context length is 8192"),
        (
            b'{"prompt":[10],"stream":true,"use_beam_search":true}',
            400,
            "Streaming is not currently supported with beam",
        ),
    ],
    ids=["not-json", "model", "logprobs", "vocabulary", "type", "shape", "length", "beam"],
)
async def test_refusals(body: bytes, status: int, message: str) -> None:
    async with simulator() as (client, _):
        reply = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == status
        assert message in reply.json()["error"]["message"]
        assert reply.json()["error"]["code"] == status


@pytest.mark.anyio
async def test_unknown_routes_and_discovery() -> None:
    async with simulator(model="tiny") as (client, _):
        missing = await client.get("/nope")
        assert missing.json()["error"] == {"message": "Not Found", "type": "Not Found", "param": None, "code": 404}
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        assert (await client.get("/version")).json() == {"version": "0.32.0"}
        tokens = (await client.post("/tokenize", json={"prompt": "far"})).json()
        assert tokens == {"count": 2, "max_model_len": 8192, "tokens": [72, 300], "token_strs": None}
        assert (await client.post("/detokenize", json={"tokens": [72, 300]})).json() == {"prompt": "far"}
    async with simulator(front_end=FrontEnd.RUST) as (client, _):
        assert (await client.get("/version")).json() == {"version": "0.32.0", "rust_frontend_version": "0.32.0"}
        assert (await client.post("/v1/responses", json={"input": "hi"})).status_code == 404


@pytest.mark.anyio
@BOTH
async def test_the_openai_client_is_content(front_end: FrontEnd) -> None:
    async with simulator(front_end=front_end) as (client, _):
        async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
            messages: Any = [{"role": "user", "content": "hi"}]
            chat = await api.chat.completions.create(
                model="sim", messages=messages, max_tokens=5, logprobs=True, seed=1
            )
            parts = await api.chat.completions.create(model="sim", messages=messages, max_tokens=5, seed=1, stream=True)
            streamed = "".join([part.choices[0].delta.content or "" async for part in parts])
    assert chat.choices[0].message.content == streamed
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or []) == 5


@pytest.mark.anyio
async def test_apps_share_nothing() -> None:
    async with simulator(stale_block=1) as (one, _), simulator(stale_block=1) as (other, _):
        assert (await one.post("/v1/completions", json=NAN)).status_code == 400
        assert (await other.post("/v1/completions", json=NAN)).status_code == 400
        assert (await one.get("/simulator/calls")).json()["counts"] == {"POST /v1/completions": 1}


@pytest.mark.anyio
async def test_keep_alive_comments_fill_a_pause() -> None:
    async with simulator(keep_alive_interval=0.01) as (client, engine):
        await client.post("/pause?mode=keep")
        async with client.stream("POST", "/v1/completions", json=NAN | {"stream": True}) as reply:
            pieces = reply.aiter_bytes()
            assert (await anext(pieces)).startswith(b": keep-alive\n\n")
            await client.post("/resume")
            rest = b"".join([piece async for piece in pieces])
    assert rest.endswith(b"data: [DONE]\n\n")
    assert rest.count(b"data: ") == 5
