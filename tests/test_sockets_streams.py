"""Event streams to clients: each event at once and as it came, marked where it must be, never a clean end when cut."""

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest
from fixtures_index import Fixture, load_fixtures
from sidecars import ASKED, COMPLETIONS, DONE, UVLOOP, Running, completion, connected, event, post, sidecar
from upstreams import END, STREAM_HEAD, Peer, answering, chunk, reply, run_upstream, stream

from proxy.connection import Connection

pytestmark = pytest.mark.anyio

WANTED = ASKED | {"stream": True}


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return UVLOOP


async def whole(
    running: Running, path: str = COMPLETIONS, body: dict[str, Any] = WANTED, headers: dict[str, str] | None = None
) -> bytes:
    """The bytes of a stream that ends well."""
    async with running.client.stream("POST", COMPLETIONS, json=WANTED, headers=headers) as answer:
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        assert "content-length" not in answer.headers
        return b"".join([piece async for piece in answer.aiter_raw()])


async def broken(running: Running, arrived: asyncio.Event | None = None) -> tuple[bytes, dict[str, Any]]:
    """(what came before, error of the last event) of a stream that must not end well; `arrived`: its start."""
    pieces: list[bytes] = []
    async with running.client.stream("POST", COMPLETIONS, json=WANTED) as answer:
        assert answer.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            async for piece in answer.aiter_raw():
                pieces.append(piece)
                if arrived is not None:
                    arrived.set()
    before, _, last = b"".join(pieces).rpartition(b"data: ")
    assert last.endswith(b"\n\n")
    return before, json.loads(last)["error"]


async def test_each_event_is_there_before_the_next_is_sent() -> None:
    """60 events of about 250 bytes: the upstream says one when the client has the one before."""
    arrived = asyncio.Semaphore(0)
    events = [event(f"-{number}.25", text="é\u2028") for number in range(60)]
    assert {len(one) // 50 for one in events} == {5}

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM_HEAD)
        for one in [*events, DONE]:
            await arrived.acquire()
            await peer.say(chunk(one))
        await peer.say(END)

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with running.client.stream("POST", COMPLETIONS, json=WANTED) as answer:
            pieces = answer.aiter_raw()
            for one in [*events, DONE]:
                arrived.release()
                assert await anext(pieces) == one
            assert [piece async for piece in pieces] == []


async def test_the_head_and_comments_are_there_while_the_engine_is_silent() -> None:
    heard = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM_HEAD)
        await heard.wait()
        heard.clear()
        await peer.say(chunk(b": keep-alive\n\n"))
        await heard.wait()
        await peer.say(chunk(event("-1.5") + DONE) + END)

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with running.client.stream("POST", COMPLETIONS, json=WANTED, headers={"x-request-id": "r"}) as answer:
            assert answer.headers["x-request-id"] == "r"
            heard.set()
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b": keep-alive\n\n"
            heard.set()
            assert b"".join([piece async for piece in pieces]) == event("-1.5") + DONE


ODD = (
    b": hello\r\n\r\nid: 7\r\nevent: delta\r\n" + event("-1.5", text="ü").replace(b"\n\n", b"\r\n\r\n") + b"\n"
    b"retry: 10\n\n"
    + event("-0.5").replace(b"data: ", b"data:").replace(b',"object"', b',\ndata: "object"')
    + b": x\r\r"
    b"odd line\n" + event("-2.5", text="\u2028\u0085").replace(b"\n\n", b"\r\r") + DONE
)


@pytest.mark.parametrize("size", [1, 2, 7, 1000000])
async def test_whatever_is_not_marked_leaves_as_it_came_at_any_split(size: int) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM_HEAD)
        for at in range(0, len(ODD), size):
            await peer.say(chunk(ODD[at : at + size]))
        await peer.say(END)

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        assert await whole(running) == ODD


async def test_an_event_cut_in_two_waits_for_its_rest_and_holds_nothing_else_back() -> None:
    """Cut inside a UTF-8 character, and between the CR and the LF that end it."""
    first, second = (event("-1.5", text=text).replace(b"\n\n", b"\r\n\r\n") for text in ("é", "ü"))
    character = second.index("ü".encode()) + 1
    pieces = [first + second[:character], second[character:-1], second[-1:] + DONE]
    expected = [first, second, DONE]
    arrived = asyncio.Semaphore(0)

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM_HEAD)
        for piece in pieces:
            await peer.say(chunk(piece))
            await arrived.acquire()
        await peer.say(END)

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with running.client.stream("POST", COMPLETIONS, json=WANTED) as answer:
            got = answer.aiter_raw()
            assert await anext(got) == expected[0]
            arrived.release()
            arrived.release()
            rest = await anext(got)
            arrived.release()
            rest += b"".join([piece async for piece in got])
    assert rest == expected[1] + expected[2]


@pytest.mark.parametrize(
    ("headers", "mark"),
    [({}, b"9999.0"), ({"X-Nan-Encoding": "null"}, b"null"), ({"X-Nan-Encoding": "literal"}, b"NaN")],
)
async def test_unscorable_tokens_are_marked_event_by_event(headers: dict[str, str], mark: bytes) -> None:
    events = [event("-1.5"), event("null", "-0.5", "-9999.0"), event("-0.25", finish='"length"'), DONE]
    async with run_upstream(answering(stream(*events))) as upstream, sidecar(upstream.url) as running:
        got = (await whole(running, headers=headers)).split(b"\n\n")
        assert running.metric("unscorable_tokens_total", route=COMPLETIONS, reason="nan") == 1.0
        assert running.metric("unscorable_tokens_total", route=COMPLETIONS, reason="floor") == 1.0
        assert running.metric("sampled_tokens_total", route=COMPLETIONS) == 5.0
        incident = (await running.client.get("/sidecar/incidents")).json()["incidents"][0]
    assert [got[0], got[2], got[3], got[4]] == [events[0][:-2], events[2][:-2], DONE[:-2], b""]
    assert b'"token_logprobs":[' + mark + b",-0.5," + mark + b"]" in got[1]
    assert got[1].count(b'"unscorable":{"nan":[0],"floor":[2]}') == 1
    assert incident["positions"] == {"0": {"nan": [1], "floor": [3]}}  # counted over the whole stream


async def test_two_choices_interleaved_keep_their_own_positions() -> None:
    events = [event("-1.5", index=0), event("null", index=1), event("null", index=0), event("-2.5", index=1), DONE]
    async with run_upstream(answering(stream(*events))) as upstream, sidecar(upstream.url) as running:
        await whole(running)
        incident = (await running.client.get("/sidecar/incidents")).json()["incidents"][0]
    assert incident["positions"] == {"1": {"nan": [0]}, "0": {"nan": [1]}}


async def test_error_events_pass_on() -> None:
    error = b'data: {"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","code":500}}\n\n'
    async with (
        run_upstream(answering(stream(event("-1.5"), error, DONE))) as upstream,
        sidecar(upstream.url) as running,
    ):
        assert await whole(running) == event("-1.5") + error + DONE


@pytest.mark.parametrize(
    ("tail", "kind"),
    [
        (b"", "closed the connection inside its reply"),
        (b"20\r\ndata: {", "closed the connection inside its reply"),
        (END, "without the last event"),
        (chunk(event("-0.5")[:-1]) + END, "without the last event"),
        (chunk(b"data: {broken\n\n") + chunk(DONE) + END, "no JSON"),
        (chunk(b"data: 7\n\n") + chunk(DONE) + END, "no JSON"),
        (b"zz\r\n", "does not answer in HTTP"),
    ],
    ids=["cut", "cut_in_event", "clean_end", "half_event", "no_json", "number", "bad_chunk"],
)
async def test_a_stream_that_breaks_ends_in_an_error_event_and_an_incomplete_read(tail: bytes, kind: str) -> None:
    arrived = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM_HEAD + chunk(event("-1.5")))
        await arrived.wait()
        await peer.say(tail)

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        before, error = await broken(running, arrived)
        incident = (await running.client.get("/sidecar/incidents")).json()["incidents"][0]
    assert before == event("-1.5")
    assert (error["type"], error["code"]) == ("upstream_protocol_error", 502)
    assert kind in error["message"]
    assert incident["action"] == "failed"
    assert len(upstream.seen) == 1


async def test_a_stream_reset_by_the_upstream_is_no_clean_end() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM_HEAD + chunk(event("-1.5")))
        await arrived.wait()
        peer.reset()

    arrived = asyncio.Event()
    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with connected(running.url) as (reader, writer):
            writer.write(post(COMPLETIONS, json.dumps(WANTED).encode()))
            await reader.readuntil(b"}\n\n\r\n")
            arrived.set()
            rest = await reader.read()
    assert b'"type":"upstream_protocol_error"' in rest
    assert not rest.endswith(END)


async def test_silence_over_the_read_timeout_ends_in_an_error_event() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM_HEAD + chunk(event("-1.5")))
        await peer.gone()

    async with run_upstream(script) as upstream, sidecar(upstream.url, read_timeout=0.1) as running:
        before, error = await broken(running)
        await upstream.until(lambda: upstream.peers[0].closed.is_set())
    assert before == event("-1.5")
    assert (error["type"], error["code"]) == ("upstream_timeout", 504)


@pytest.mark.parametrize("ending", ["until_close", "until_close_cut"])
async def test_a_stream_that_ends_with_its_connection(ending: str) -> None:
    head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    body = event("-1.5") + (DONE if ending == "until_close" else b"")
    async with run_upstream(answering(head + body, close=True)) as upstream, sidecar(upstream.url) as running:
        if ending == "until_close":
            assert await whole(running) == body
        else:
            assert (await broken(running))[0] == body


@pytest.mark.parametrize("kind", [b"text/event-stream", b"Text/Event-Stream;charset=UTF-8"])
async def test_a_stream_the_client_did_not_ask_for_is_one_all_the_same(kind: bytes) -> None:
    raw = stream(event("null"), DONE).replace(b"text/event-stream; charset=utf-8", kind)
    async with run_upstream(answering(raw)) as upstream, sidecar(upstream.url) as running:
        answer = await running.client.post(COMPLETIONS, json=ASKED)
    assert answer.headers["content-type"] == kind.decode()
    assert '"token_logprobs":[9999.0]' in answer.text
    assert answer.content.endswith(DONE)


async def test_a_whole_reply_where_a_stream_was_asked_for_is_marked_too() -> None:
    async with run_upstream(answering(reply(completion("null")))) as upstream, sidecar(upstream.url) as running:
        answer = await running.client.post(COMPLETIONS, json=WANTED)
    assert (answer.status_code, answer.headers["x-unscorable-tokens"]) == (200, "1")
    assert '"token_logprobs":[9999.0]' in answer.text


async def test_a_compressed_stream_is_refused_before_it_begins() -> None:
    head = STREAM_HEAD.replace(b"transfer", b"content-encoding: gzip\r\ntransfer")
    raw = head + chunk(gzip.compress(event("NaN") + DONE)) + END
    async with run_upstream(answering(raw)) as upstream, sidecar(upstream.url) as running:
        answer = await running.client.post(COMPLETIONS, json=WANTED)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "upstream_protocol_error")
    assert upstream.seen[0].all(b"accept-encoding") == [b"identity"]


async def test_reject_ends_the_stream_at_the_first_unscorable_token() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM_HEAD + chunk(event("-1.5")))
        await arrived.wait()
        await peer.say(chunk(event("null")))
        await peer.gone()

    arrived = asyncio.Event()
    async with run_upstream(script) as upstream, sidecar(upstream.url, on_unscorable="reject") as running:
        before, error = await broken(running, arrived)
        await upstream.until(lambda: upstream.peers[0].closed.is_set())
    assert before == event("-1.5")
    assert (error["type"], error["code"]) == ("unscorable_logprobs", 502)


async def test_a_client_that_leaves_closes_the_upstream_at_once() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM_HEAD + chunk(event("-1.5")))
        await peer.gone()

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with running.client.stream("POST", COMPLETIONS, json=WANTED) as answer:
            assert await anext(answer.aiter_raw()) == event("-1.5")
        await upstream.until(lambda: upstream.peers[0].closed.is_set())
        await running.settled()
        assert running.metric("client_disconnects_total") == 1.0
        assert running.metric("sampled_tokens_total", route=COMPLETIONS) == 1.0
        assert running.metric("upstream_errors_total", kind="cut") is None


async def test_a_slow_client_holds_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = asyncio.Event()
    pause = Connection.pause

    def watched_pause(self: Connection) -> None:
        pause(self)
        paused.set()

    monkeypatch.setattr(Connection, "pause", watched_pause)
    body = event("-1.5", text="x" * 8000) * 2000 + DONE  # 16 MB
    raw = STREAM_HEAD + b"".join(chunk(body[at : at + 65536]) for at in range(0, len(body), 65536)) + END
    async with run_upstream(answering(raw)) as upstream, sidecar(upstream.url) as running:
        async with running.client.stream("POST", COMPLETIONS, json=WANTED) as answer:
            await paused.wait()
            assert upstream.peers[0].writer.transport.get_write_buffer_size() > 0
            assert b"".join([piece async for piece in answer.aiter_raw()]) == body


async def test_one_line_of_megabytes_is_one_event() -> None:
    body = event("-1.5", text="é" * 1500000) + DONE
    async with run_upstream(answering(STREAM_HEAD + chunk(body) + END)) as upstream, sidecar(upstream.url) as running:
        assert await whole(running) == body


async def test_a_connection_is_kept_after_a_stream_that_ended_well() -> None:
    async with run_upstream(answering(stream(event("-1.5"), DONE))) as upstream, sidecar(upstream.url) as running:
        for _ in range(3):
            await whole(running)
    assert [seen.connection for seen in upstream.seen] == [0, 0, 0]


async def test_a_stream_of_another_route_is_passed_through_at_once_and_unseen() -> None:
    """/v1/messages streams, but carries no logprobs."""
    arrived = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(STREAM_HEAD + chunk(b"event: ping\n"))
        await arrived.wait()
        await peer.say(chunk(b'data: {"token_logprobs":[NaN]}\n\n') + END)

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with running.client.stream("POST", "/v1/messages", json={}) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"event: ping\n"
            arrived.set()
            assert b"".join([piece async for piece in pieces]) == b'data: {"token_logprobs":[NaN]}\n\n'


HOP = ("connection", "transfer-encoding", "content-length")


def delivered(server: str) -> list[Fixture]:
    """What arrives whole."""
    return [one for one in load_fixtures(server) if one.expect["class"] in ("ok", "bad_positions")]


@pytest.mark.parametrize(("server", "count"), [("vllm-0.32", 69), ("vllm-0.32-rust", 56)])
async def test_vllms_own_replies_leave_as_they_came_or_marked_where_they_must_be(server: str, count: int) -> None:
    fixtures = delivered(server)
    assert len(fixtures) == count
    async with run_upstream(answering(*map(as_sent, fixtures))) as upstream:
        async with sidecar(upstream.url, trip_ratio=0, allow_positive=True) as running:  # some ran with raw_logits
            for fixture in fixtures:
                path, headers = fixture.request["path"], fixture.request["headers"]
                answer = await running.client.post(path, content=fixture.request_body, headers=headers)
                bad = sum(map(len, fixture.expect.get("bad_positions", {}).values()))
                assert answer.status_code == fixture.status, fixture.name
                assert (answer.content == fixture.body) is (bad == 0), fixture.name
                if not fixture.streamed:
                    assert answer.headers.get("x-unscorable-tokens") == (str(bad) if bad else None), fixture.name
            totals = running.app.sidecar.metrics.totals()
    tokens = sum(value for name, value in totals.items() if name.startswith("unscorable_tokens_total"))
    assert tokens == sum(len(at) for one in fixtures for at in one.expect.get("bad_positions", {}).values())


def as_sent(fixture: Fixture) -> bytes:
    headers = [(name.encode(), value.encode()) for name, value in fixture.headers if name.lower() not in HOP]
    lines = [b"HTTP/1.1 %d Said" % fixture.status, *(name + b": " + value for name, value in headers)]
    if fixture.streamed:
        return b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", chunk(fixture.body) + END])
    return b"\r\n".join([*lines, b"content-length: %d" % len(fixture.body), b"", fixture.body])
