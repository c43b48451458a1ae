"""The ladder, reject mode, the breaker, incidents, metrics, 64 requests at once: what a client sees on real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sidecars import (
    ASKED,
    CHAT,
    COMPLETIONS,
    DONE,
    NOT_COMPLIANT,
    UVLOOP,
    Running,
    completion,
    connected,
    event,
    post,
    serving,
    sidecar,
)
from upstreams import STREAM_HEAD, Peer, ScriptedUpstream, answering, chunk, reply, run_upstream, stream
from uvicorn.server import ServerState

from proxy.simulator import SimulatorConfig, create_simulator
from proxy.simulator.control import Engine

pytestmark = pytest.mark.anyio

CLEAN = completion("-1.5", "-0.25")
REFUSED = reply(NOT_COMPLIANT, b"400 Bad Request")
STREAMED = stream(event("-1.5"), event("null"), event("-0.5", finish='"length"'), DONE)
POISON = {"prompt": [10, 300, 12], "max_tokens": 4, "logprobs": 0, "seed": 7}


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return UVLOOP


@asynccontextmanager
async def behind_simulator(config: SimulatorConfig, **settings: Any) -> AsyncIterator[tuple[Running, Engine, str]]:
    """A sidecar in front of a stand-in, the stand-in's engine, its URL."""
    app = create_simulator(config)
    async with serving(app, ServerState()) as url, sidecar(url, **settings) as running:
        yield running, app.state.engine, url  # type: ignore[attr-defined]


def bodies(upstream: ScriptedUpstream) -> list[dict[str, Any]]:
    return [json.loads(seen.body) for seen in upstream.seen]


async def refusal(running: Running, path: str = COMPLETIONS, **body: Any) -> tuple[int, str, str]:
    """(status, error type, message)"""
    answer = await running.client.post(path, json=ASKED | body)
    error = answer.json()["error"]
    return answer.status_code, error["type"], error["message"]


@pytest.mark.parametrize(
    "refused",
    [
        REFUSED,
        reply(NOT_COMPLIANT.replace(b"compliant", b"compliant: nan"), b"500 Internal Server Error"),
        reply(b"Internal Server Error", b"500 Internal Server Error", b"text/plain; charset=utf-8"),
    ],
    ids=["vllm", "older_vllm", "sglang"],
)
async def test_a_repeat_with_a_fresh_salt_heals(refused: bytes) -> None:
    request = ASKED | {"seed": 3, "cache_salt": "mine", "unknown": {"kept": 1}}
    async with run_upstream(answering(refused, reply(CLEAN, headers=[(b"x-vllm", b"1")]))) as upstream:
        async with sidecar(upstream.url) as running:
            answer = await running.client.post(COMPLETIONS, json=request, headers={"x-request-id": "r1"})
            assert running.metric("recoveries_total", action="retry", outcome="recovered") == 1.0
            incident = (await running.client.get("/sidecar/incidents")).json()["incidents"][0]
    assert (answer.status_code, answer.content) == (200, CLEAN)
    assert (answer.headers["x-sidecar-recovery"], answer.headers["x-vllm"]) == ("retry", "1")
    assert "x-unscorable-tokens" not in answer.headers
    first, second = bodies(upstream)
    assert first == request
    assert second == request | {"cache_salt": second["cache_salt"]}
    assert len(second["cache_salt"]) == 32
    assert [seen.all(b"x-request-id") for seen in upstream.seen] == [[b"r1"], [b"r1"]]

    assert (incident["action"], incident["detail"], incident["request_id"]) == ("passed", "recovered by retry", "r1")


@pytest.mark.parametrize(("retries", "sent"), [(0, 2), (1, 3), (3, 5)])
async def test_then_it_is_streamed_and_put_together(retries: int, sent: int) -> None:
    async with run_upstream(answering(*[REFUSED] * (retries + 1), STREAMED)) as upstream:
        async with sidecar(upstream.url, retries=retries, nan_encoding="null") as running:
            answer = await running.client.post(COMPLETIONS, json=ASKED)
            assert running.metric("recoveries_total", action="stream", outcome="recovered") == 1.0
            assert running.metric("recoveries_total", action="retry", outcome="failed") == (retries or None)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert (answer.headers["x-sidecar-recovery"], answer.headers["x-unscorable-tokens"]) == ("stream", "1")
    choice = answer.json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-1.5, None, -0.5]
    assert choice["logprobs"]["unscorable"] == {"nan": [1]}
    assert (choice["finish_reason"], choice["text"]) == ("length", "xxx")
    assert len(upstream.seen) == sent
    assert [body.get("stream") for body in bodies(upstream)] == [None] * (sent - 1) + [True]
    assert len({body.get("cache_salt") for body in bodies(upstream)}) == sent


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt_logprobs": 1}),
        (COMPLETIONS, {"use_beam_search": True, "n": 2}),
        (COMPLETIONS, {"echo": True, "n": 2}),
        ("/v1/chat/completions/batch", {"messages": [[]], "logprobs": True}),
        ("/v1/responses", {"input": "a", "include": ["message.output_text.logprobs"]}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"logprobs": 0}}),
        (COMPLETIONS, {"stream": True}),
        (CHAT, {"messages": [], "logprobs": True, "stream": True}),
    ],
    ids=["prompt_logprobs", "beam", "echo_n2", "batch", "responses", "generate", "stream_wanted", "chat_stream_wanted"],
)
async def test_what_no_stream_can_carry_is_a_502_with_the_upstreams_words(path: str, body: dict[str, Any]) -> None:
    async with run_upstream(answering(REFUSED)) as upstream, sidecar(upstream.url) as running:
        status, kind, message = await refusal(running, path, **body)
        incident = (await running.client.get("/sidecar/incidents")).json()["incidents"][0]
    assert (status, kind) == (502, "unscorable_logprobs")
    assert "Out of range float values are not JSON compliant" in message
    assert len(upstream.seen) == 2  # once as it came, once with a fresh salt
    assert (incident["action"], incident["route"]) == ("failed", path)


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (reply(b'{"error":{"message":"no streams here"}}', b"400 Bad Request"), "HTTP 400"),
        (reply(CLEAN), "HTTP 200"),
        (stream(event("-1.5"), b'data: {"error":{"message":"EngineCore died"}}\n\n', DONE), "EngineCore died"),
        (stream(event("-1.5"), DONE), "finish_reason"),
        (stream(event("-1.5")), "finish_reason"),
        (STREAMED[: len(STREAM_HEAD) + 200], "closed the connection inside its reply"),
        (stream(b"data: {broken\n\n", DONE), "no JSON"),
        (stream(b"data: [1]\n\n", DONE), "no JSON object"),
        (stream(b'data: {"choices":[{"index":5}]}\n\n', DONE), "choice 5"),
        (stream(b'data: {"choices":{}}\n\n', DONE), "choices"),
        (stream(b'data: {"choices":[{"index":0,"logprobs":[1]}]}\n\n', DONE), "a choice without text"),
        (b"garbage", "does not answer in HTTP"),
        (b"", "before it answered"),
    ],
    ids=[
        "refused", "no_stream", "error_event", "done_too_early", "clean_end_too_early", "cut", "no_json", "no_object",
        "wrong_choice", "choices_object", "logprobs_list", "garbage", "nothing",
    ],
)  # fmt: skip
async def test_a_stream_that_fails_too_is_a_502_with_both_reasons(last: bytes, why: str) -> None:
    script = answering(REFUSED, REFUSED, last, close=True)
    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        status, kind, message = await refusal(running)
        assert running.metric("recoveries_total", action="stream", outcome="failed") == 1.0
    assert (status, kind) == (502, "unscorable_logprobs")
    assert "Out of range float values" in message
    assert why in message
    assert len(upstream.seen) == 3


async def test_a_request_that_cannot_be_read_is_never_rewritten() -> None:
    async with run_upstream(answering(REFUSED)) as upstream, sidecar(upstream.url) as running:
        answer = await running.client.post(COMPLETIONS, content=b"{gzip or so", headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.content) == (400, NOT_COMPLIANT)
    assert [seen.body for seen in upstream.seen] == [b"{gzip or so"]


async def test_a_runaway_is_cut_and_the_upstream_closed() -> None:
    async def script(peer: Peer) -> None:
        while (seen := await peer.request()) is not None:
            if b'"stream":true' not in seen.body:
                await peer.say(REFUSED)
                continue
            await peer.say(STREAM_HEAD + chunk(event("-1.5")) + b"".join([chunk(event("null"))] * 70))
            await peer.gone()  # the stream would go on for ever
            return

    async with run_upstream(script) as upstream, sidecar(upstream.url, runaway_tokens=64) as running:
        answer = await running.client.post(COMPLETIONS, json=ASKED | {"max_tokens": 8000})
        await upstream.until(lambda: upstream.peers[-1].closed.is_set())
        assert running.metric("runaway_aborts_total") == 1.0
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert choice["logprobs"]["unscorable"] == {"nan": list(range(1, 65))}
    assert (answer.headers["x-unscorable-tokens"], answer.headers["x-sidecar-recovery"]) == ("64", "stream")


async def test_the_engine_of_a_runaway_stops_within_sixteen_tokens() -> None:
    async with behind_simulator(SimulatorConfig(latency_per_token=0.002)) as (running, engine, _):
        request = POISON | {"max_tokens": 200}
        assert (await running.client.post(COMPLETIONS, json=request)).headers["x-sidecar-recovery"] == "stream"
        await engine.until(lambda: engine.running == 0)
        assert 400 + 64 <= engine.generation_tokens <= 400 + 64 + 16  # twice whole, once cut
        assert engine.finished["abort"] == 1


@pytest.mark.parametrize("at", [1, 2, 3], ids=["first", "repeat", "stream"])
async def test_a_client_that_leaves_during_the_ladder_closes_the_upstream(at: int) -> None:
    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            if len(upstream.seen) < at:
                await peer.say(REFUSED)
                continue
            if at == 3:
                await peer.say(STREAM_HEAD + chunk(event("-1.5")))
            await peer.gone()
            upstream.ring()
            return

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with connected(running.url) as (_, writer):
            writer.write(post(COMPLETIONS, json.dumps(ASKED).encode()))
            await upstream.until(lambda: len(upstream.seen) == at)
        await upstream.until(lambda: upstream.peers[-1].closed.is_set())
        await running.settled()
        assert running.metric("client_disconnects_total") == 1.0
        assert (await running.client.get("/sidecar/incidents")).json()["total"] == 0
    assert len(upstream.seen) == at


async def test_a_client_that_leaves_between_repeats_is_the_end_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = asyncio.Event()
    sleep = asyncio.sleep

    async def endless(delay: float) -> None:
        waits.set()
        await sleep(3600)

    async with run_upstream(answering(b"", close=True)) as upstream, sidecar(upstream.url) as running:
        async with connected(running.url) as (_, writer):
            monkeypatch.setattr(asyncio, "sleep", endless)
            writer.write(post(COMPLETIONS, b"{}"))
            await waits.wait()
        await running.settled()
        assert running.metric("client_disconnects_total") == 1.0
        monkeypatch.undo()
    assert len(upstream.seen) == 1


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ((reply(completion("-1.5", "null", "-9999.0")),), "2 of 3 tokens"),
        ((REFUSED, reply(completion("NaN"))), "1 of 1 tokens"),
        ((REFUSED, REFUSED, STREAMED), "1 of 3 tokens"),
    ],
    ids=["marked", "retried", "streamed"],
)
async def test_reject_answers_502_instead_of_marking(raw: tuple[bytes, ...], found: str) -> None:
    async with run_upstream(answering(*raw, reply(CLEAN))) as upstream:
        async with sidecar(upstream.url, on_unscorable="reject") as running:
            status, kind, message = await refusal(running)
            incident = (await running.client.get("/sidecar/incidents")).json()["incidents"][0]
            assert (await running.client.post(COMPLETIONS, json=ASKED)).content == CLEAN
    assert (status, kind) == (502, "unscorable_logprobs")
    assert found in message
    assert incident["action"] == "rejected"


async def test_reject_refuses_logprobs_that_are_gone_without_a_trace() -> None:
    gone = b'{"choices":[{"index":0,"text":"abc","logprobs":null,"finish_reason":"length"}]}'
    async with run_upstream(answering(reply(gone))) as upstream:
        async with sidecar(upstream.url, on_unscorable="reject") as running:
            assert (await refusal(running))[:2] == (502, "unscorable_logprobs")
        async with sidecar(upstream.url) as running:
            answer = await running.client.post(COMPLETIONS, json=ASKED)
            assert (answer.status_code, answer.content) == (200, gone)
            assert running.metric("unscorable_responses_total", route=COMPLETIONS) == 1.0


BAD = reply(completion("null", "-1.0"))
GOOD = reply(CLEAN)


async def test_the_breaker_trips_on_a_pattern_and_refuses_generation_alone() -> None:
    async with run_upstream(answering(GOOD, BAD, BAD, GOOD)) as upstream:
        async with sidecar(upstream.url, trip_min_responses=3, trip_probe_interval=3600) as running:
            marks = [
                (await running.client.post(COMPLETIONS, json=ASKED)).headers.get("x-unscorable-tokens")
                for _ in range(3)
            ]
            assert marks == [None, "1", "1"]
            answer = await running.client.post(CHAT, json=ASKED)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (503, "engine_unhealthy")
            assert "2 of the last 3 replies" in error["message"]
            assert 3599 <= int(answer.headers["retry-after"]) <= 3601
            health = await running.client.get("/health")
            assert (health.status_code, health.json()["breaker"]) == (503, "open")
            assert health.json()["upstream"]["state"] == "ok"
            assert (await running.client.post("/pause")).status_code == 200
            assert running.metric("breaker_state") == 2.0
    assert [seen.target for seen in upstream.seen if seen.method == b"POST"] == [b"/v1/completions"] * 3 + [b"/pause"]


async def test_a_clean_probe_closes_the_breaker_and_a_bad_one_does_not() -> None:
    async with run_upstream(answering(BAD, BAD, BAD, GOOD)) as upstream:
        async with sidecar(upstream.url, trip_min_responses=2, trip_probe_interval=1e-9) as running:
            states = []
            for _ in range(4):
                assert (await running.client.post(COMPLETIONS, json=ASKED)).status_code == 200
                states.append(running.metric("breaker_state"))
            assert states == [0.0, 2.0, 2.0, 0.0]
            assert (await running.client.get("/health")).status_code == 200


async def test_one_probe_at_a_time() -> None:
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            if len(upstream.seen) == 2:
                await release.wait()
            await peer.say(GOOD if len(upstream.seen) > 1 else BAD)

    async with run_upstream(script) as upstream:
        async with sidecar(upstream.url, trip_min_responses=1, trip_probe_interval=3600) as running:
            await running.client.post(COMPLETIONS, json=ASKED)
            running.app.sidecar.breaker._next_probe = 0.0  # an hour later
            probe = asyncio.create_task(running.client.post(COMPLETIONS, json=ASKED))
            await upstream.until(lambda: len(upstream.seen) == 2)
            assert (await refusal(running))[:2] == (503, "engine_unhealthy")
            assert running.metric("breaker_state") == 1.0
            release.set()
            assert (await probe).content == CLEAN
            assert (await running.client.post(COMPLETIONS, json=ASKED)).content == CLEAN


async def test_trip_ratio_zero_turns_the_breaker_off() -> None:
    async with run_upstream(answering(BAD)) as upstream:
        async with sidecar(upstream.url, trip_ratio=0, trip_min_responses=1) as running:
            codes = [(await running.client.post(COMPLETIONS, json=ASKED)).status_code for _ in range(4)]
    assert codes == [200] * 4


async def test_incidents_are_bounded_and_newest_first() -> None:
    async with run_upstream(answering(BAD)) as upstream:
        async with sidecar(upstream.url, incidents=3, trip_ratio=0) as running:
            for number in range(5):
                await running.client.post(COMPLETIONS, json=ASKED, headers={"x-request-id": f"r{number}"})
            kept = (await running.client.get("/sidecar/incidents")).json()
            status = (await running.client.get("/sidecar/status")).json()
    assert [incident["request_id"] for incident in kept["incidents"]] == ["r4", "r3", "r2"]
    assert (kept["total"], status["incidents"]) == (5, 5)
    incident = kept["incidents"][0]
    assert (incident["reasons"], incident["positions"]) == ({"nan": 1}, {"0": {"nan": [0]}})
    assert (incident["action"], incident["route"]) == ("marked", COMPLETIONS)


async def test_metrics_are_exact_after_a_known_sequence_and_their_labels_closed() -> None:
    replies = (
        GOOD,
        BAD,
        REFUSED,
        GOOD,
        REFUSED,
        REFUSED,
        STREAMED,
        reply(b"{}", b"404 Not Found"),
        reply(b"{no"),
        GOOD,
    )
    async with run_upstream(answering(*replies)) as upstream, sidecar(upstream.url) as running:
        codes = [(await running.client.post(COMPLETIONS, json=ASKED)).status_code for _ in range(6)]
        for path in ("/v1/models", "/any/thing", "/nan/null/v1/embeddings"):
            await running.client.get(path)
        text = (await running.client.get("/metrics")).text
    assert codes == [200, 200, 200, 200, 404, 502]
    samples = {  # labels in the order of their names
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_sum"))
    }
    assert {name.startswith("logprob_sidecar_") for name, *_ in samples} == {True}
    counted = {(name.removeprefix("logprob_sidecar_"), *labels): value for (name, *labels), value in samples.items()}
    version = next(key for key in counted if key[0] == "build_info")
    assert {key: value for key, value in counted.items() if value} == {
        version: 1.0,
        ("requests_total", "200", COMPLETIONS): 4.0,
        ("requests_total", "404", COMPLETIONS): 1.0,
        ("requests_total", "502", COMPLETIONS): 1.0,
        ("requests_total", "200", "other"): 3.0,
        ("request_seconds_count", COMPLETIONS): 6.0,
        ("request_seconds_count", "other"): 3.0,
        ("overhead_seconds_count", COMPLETIONS): 6.0,
        ("overhead_seconds_count", "other"): 3.0,
        ("sampled_tokens_total", COMPLETIONS): 9.0,  # 2 + 2 + 2 + 3
        ("unscorable_tokens_total", "nan", COMPLETIONS): 2.0,
        ("unscorable_responses_total", COMPLETIONS): 2.0,
        ("recoveries_total", "retry", "recovered"): 1.0,
        ("recoveries_total", "retry", "failed"): 1.0,
        ("recoveries_total", "stream", "recovered"): 1.0,
        ("upstream_errors_total", "not_compliant"): 3.0,
        ("upstream_errors_total", "client_error"): 1.0,
        ("upstream_errors_total", "bad_reply"): 1.0,
    }


async def test_64_at_once_each_reply_is_its_own_and_whole_or_an_error_that_says_why() -> None:
    """Poisoned and clean, streamed and not; every eighth client leaves, every fourth upstream connection is cut."""
    config = SimulatorConfig(latency_per_token=0.001, nan_rate=0.02, missing_rate=0.02, floor_rate=0.02)
    async with behind_simulator(config, nan_encoding="null", trip_ratio=0) as (running, engine, url):
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False) as direct:
            outcomes = await asyncio.gather(*(one_of_64(number, running, direct) for number in range(64)))
        await running.settled()
        await engine.until(lambda: engine.running == 0)
        assert running.metric("inflight") == 0.0
        assert running.metric("client_disconnects_total") == 8.0
    assert sorted(outcomes) == ["cut"] * 16 + ["left"] * 8 + ["whole"] * 40


async def one_of_64(number: int, running: Running, direct: httpx.AsyncClient) -> str:
    streamed = number % 2 == 0
    body = {"prompt": [10, 300 if number % 3 == 0 else 20, number], "max_tokens": 24, "logprobs": 1, "seed": number}
    body |= {"return_token_ids": True, "stream": streamed}
    headers = {"x-request-id": f"request-{number}"}
    if number % 8 in (3, 6):
        cut = body | {"vllm_xargs": {"cut_at": 9}}
        if streamed:
            with pytest.raises(httpx.RemoteProtocolError):
                await read_events(running.client, cut, headers)
        else:
            answer = await running.client.post(COMPLETIONS, json=cut, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (502, "upstream_protocol_error")
        return "cut"
    if number % 8 == 5:
        async with connected(running.url) as (_, writer):
            endless = json.dumps(body | {"max_tokens": 5000, "logprobs": None}).encode()
            writer.write(post(COMPLETIONS, endless))
            await asyncio.sleep(0.01)  # anywhere: before, in or after the wait for its reply
        return "left"
    truth = await read_events(direct, body | {"stream": True}, headers)
    values = [value for one in truth for value in one["choices"][0]["logprobs"]["token_logprobs"]]
    ids = [token for one in truth for token in one["choices"][0]["token_ids"]]
    if streamed:
        events = await read_events(running.client, body, headers)
        assert {one["id"] for one in events} == {f"cmpl-request-{number}"}
        got_ids = [token for one in events for token in one["choices"][0]["token_ids"]]
        got = [value for one in events for value in one["choices"][0]["logprobs"]["token_logprobs"]]
    else:
        answer = await running.client.post(COMPLETIONS, json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.json()["id"] == f"cmpl-request-{number}"
        choice = answer.json()["choices"][0]
        got_ids, got = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert got_ids == ids
    assert got == [None if value == -9999.0 else value for value in values]
    return "whole"


async def read_events(client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> list[dict[str, Any]]:
    """The events of a stream that ends well, without [DONE]."""
    async with client.stream("POST", COMPLETIONS, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        text = b"".join([piece async for piece in answer.aiter_raw()])
    *events, done, rest = text.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(one.removeprefix(b"data: ")) for one in events]
