"""An upstream that is down, lies, breaks off or speaks no HTTP: the client learns why; never a 200 or {}."""

import asyncio
import gzip
import json
import socket
from contextlib import closing

import pytest
from sidecars import ASKED, CHAT, COMPLETIONS, UVLOOP, Running, completion, connected, post, say, sidecar
from upstreams import END, Peer, Script, answering, chunk, reply, run_upstream

pytestmark = pytest.mark.anyio

CLEAN = completion("-1.5", "-0.25")
BOTH = pytest.mark.parametrize("path", ["/other", COMPLETIONS], ids=["passthrough", "generation"])


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return UVLOOP


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def saying(raw: bytes) -> Script:
    """Answers each request with these bytes and closes."""
    return answering(raw, close=True)


async def error_of(running: Running, path: str = COMPLETIONS) -> tuple[int, dict[str, object]]:
    """Status and OpenAI-shaped error of one POST."""
    answer = await running.client.post(path, json=ASKED)
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert body["error"]["code"] == answer.status_code
    return answer.status_code, body["error"]


async def test_an_upstream_that_is_down_is_named_and_recovers_by_itself() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with sidecar(url, connect_retries=1) as running:
        for path in (COMPLETIONS, CHAT, "/v1/models", "/pause"):
            status, error = await error_of(running, path)
            assert (status, error["type"]) == (502, "upstream_unreachable")
            assert url in str(error["message"])
        health = await running.client.get("/health")
        assert (health.status_code, health.json()["upstream"]["state"]) == (503, "unreachable")
        assert health.json()["upstream"]["url"] == url
        assert (await running.client.get("/readyz")).status_code == 503
        assert (await running.client.get("/livez")).status_code == 200
        answer = await running.client.get("/sidecar/upstream-metrics")
        assert (answer.status_code, answer.json()["error"]["type"]) == (502, "upstream_unreachable")
        assert running.metric("upstream_errors_total", kind="unreachable") == 6.0  # two generations, each tried twice
        async with run_upstream(answering(reply(CLEAN)), port=port):
            assert (await running.client.get("/health")).json()["status"] == "ok"
            assert (await running.client.get("/readyz")).status_code == 200
            assert (await running.client.post(COMPLETIONS, json=ASKED)).content == CLEAN
        assert (await error_of(running))[0] == 502
        assert (await running.client.get("/health")).status_code == 503


async def test_a_repeat_reaches_an_upstream_that_comes_back_meanwhile() -> None:
    async with run_upstream(answering(reply(CLEAN))) as upstream:
        async with sidecar(upstream.url, connect_retries=2) as running:
            connect, left = running.app.sidecar.upstream._connect, [1, 1]

            async def refusing() -> object:
                if left:
                    left.pop()
                    raise_unreachable()
                return await connect()

            running.app.sidecar.upstream._connect = refusing  # type: ignore[method-assign,assignment]
            assert (await running.client.post(COMPLETIONS, json=ASKED)).content == CLEAN
    assert len(upstream.seen) == 1


def raise_unreachable() -> None:
    from proxy.errors import Unreachable

    raise Unreachable("not yet")


@pytest.mark.parametrize("status", [500, 503])
async def test_health_says_what_the_upstream_said(status: int) -> None:
    async with run_upstream(answering(reply(b"engine dead", b"%d Broken" % status))) as upstream:
        async with sidecar(upstream.url) as running:
            health = await running.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
    assert health.json()["upstream"]["detail"] == f"HTTP {status}: engine dead"
    assert health.json()["breaker"] == "closed"


async def test_a_busy_upstream_is_ready_and_not_unreachable() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async with run_upstream(script) as upstream, sidecar(upstream.url, health_timeout=0.1) as running:
        assert (await running.client.get("/readyz")).status_code == 200
        health = await running.client.get("/health")
        assert (health.status_code, health.json()["upstream"]["state"]) == (503, "busy")
        await upstream.until(lambda: all(peer.closed.is_set() for peer in upstream.peers))


@pytest.mark.parametrize(
    "raw",
    [
        reply(CLEAN[:-1]),
        reply(b"{not json"),
        reply(b""),
        reply(b"null"),
        reply(b"[]"),
        reply(b'"text"'),
        reply(CLEAN + b"}"),
        reply(b"\xff\xfe{}"),
        reply(b"<html><body>gateway</body></html>", kind=b"text/html"),
        reply(b"<html><body>gateway</body></html>"),
        reply(CLEAN, kind=b"text/plain"),
        reply(CLEAN, kind=b"application/jsonlines"),
        reply(CLEAN).replace(b"content-type: application/json\r\n", b""),
        reply(gzip.compress(CLEAN), headers=[(b"content-encoding", b"gzip")]),
        reply(CLEAN).replace(b"content-length: ", b"content-length: 1"),
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(CLEAN),
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + CLEAN[:-30],
        b"HTTP/1.1 200 OK\r\ncontent-ty",
        b"H",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x15\x03\x01\x00\x02\x02P",
        b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
    ids=[
        "cut_json_right_length", "no_json", "empty", "null", "list", "string", "trailing", "bytes", "html",
        "html_as_json", "text", "almost_json", "no_type", "gzip", "length_too_long", "chunked_cut", "bad_chunk",
        "until_close_cut", "cut_head", "one_byte", "ssh", "tls", "status_999", "two_lengths", "switches",
        "only_interim",
    ],
)  # fmt: skip
async def test_a_reply_that_is_none_is_a_protocol_error(raw: bytes) -> None:
    async with run_upstream(saying(raw)) as upstream, sidecar(upstream.url) as running:
        status, error = await error_of(running)
    assert (status, error["type"]) == (502, "upstream_protocol_error")
    assert len(upstream.seen) == 1  # tokens may have been generated: it is not asked for again


@pytest.mark.parametrize(("connect_retries", "sent"), [(0, 1), (2, 3)])
async def test_closed_before_the_first_byte_is_repeated_within_the_budget(connect_retries: int, sent: int) -> None:
    async with run_upstream(saying(b"")) as upstream:
        async with sidecar(upstream.url, connect_retries=connect_retries) as running:
            status, error = await error_of(running)
    assert (status, error["type"]) == (502, "upstream_unreachable")
    assert upstream.url in str(error["message"])
    assert len(upstream.seen) == sent


async def test_a_connection_closed_at_once_fails_instead_of_hanging() -> None:
    async def script(peer: Peer) -> None:
        peer.reset()

    async with run_upstream(script) as upstream, sidecar(upstream.url, connect_retries=0) as running:
        for path in (COMPLETIONS, "/other"):
            assert (await error_of(running, path))[1]["type"] == "upstream_unreachable"


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (b"500 Internal Server Error", b"application/json", b'{"error":{"message":"boom","code":500}}'),
        (b"500 Internal Server Error", b"text/html; charset=utf-8", b"<html>\xff</html>"),
        (b"503 Service Unavailable", b"text/plain", b"loading"),
        (b"400 Bad Request", b"application/json", b'{"error":{"message":"max_tokens is too large"}}'),
        (b"401 Unauthorized", b"application/json", b'{"error":"Unauthorized"}'),
        (b"404 Not Found", b"application/json", b'{"error":{"message":"no model"}}'),
        (b"422 Unprocessable Entity", b"application/json", b'{"detail":[]}'),
        (b"429 Too Many Requests", b"application/json", b"{}"),
        (b"307 Temporary Redirect", b"text/plain", b""),
        (b"202 Accepted", b"application/x-odd", b"\x00\x01"),
    ],
)
@BOTH
async def test_any_other_status_passes_untouched_and_is_never_repeated(
    path: str, status: bytes, kind: bytes, body: bytes
) -> None:
    asked = {"model": "m", "prompt": "a"}  # without logprobs, whose plain-text 500 would mean a NaN
    extra = [(b"retry-after", b"7"), (b"location", b"/elsewhere")]
    async with run_upstream(answering(reply(body, status, kind, extra))) as upstream:
        async with sidecar(upstream.url) as running:
            answer = await running.client.post(path, json=asked)
    assert (b"%d" % answer.status_code, answer.content) == (status[:3], body)
    assert answer.headers["content-type"] == kind.decode()
    assert (answer.headers["retry-after"], answer.headers["location"]) == ("7", "/elsewhere")
    assert [json.loads(seen.body) for seen in upstream.seen] == [asked]


@BOTH
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_reply_cut_inside_is_never_a_clean_end(path: str, framing: str) -> None:
    """Passed through, its head has gone out already: the client sees fewer bytes than it was told, or no last chunk."""
    head = {
        "length": b"content-length: 99\r\n\r\nbegun",
        "chunked": b"transfer-encoding: chunked\r\n\r\n" + chunk(b"begun"),
    }
    async with run_upstream(saying(b"HTTP/1.1 200 OK\r\n" + head[framing])) as upstream:
        async with sidecar(upstream.url) as running:
            answer = await say(running.url, post(path, b"{}", b"connection: close"))
            await running.settled()
            assert running.metric("upstream_errors_total", kind="cut") == 1.0
    if path == COMPLETIONS:
        assert answer.startswith(b"HTTP/1.1 502 ")
    elif framing == "length":
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"\r\n\r\nbegun")
        assert b"content-length: 99\r\n" in answer
    else:
        assert answer.endswith(b"\r\n\r\n" + chunk(b"begun"))
        assert END not in answer


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"garbage\r\n\r\n", "upstream_protocol_error"),
        (b"HTTP/1.1 200 OK\r\nx", "upstream_protocol_error"),
        (b"", "upstream_unreachable"),
    ],
    ids=["garbage", "cut_head", "nothing"],
)
async def test_what_breaks_before_a_passed_through_reply_begins_is_a_502(raw: bytes, kind: str) -> None:
    async with run_upstream(saying(raw)) as upstream, sidecar(upstream.url) as running:
        status, error = await error_of(running, "/other")
    assert (status, error["type"], len(upstream.seen)) == (502, kind, 1)


async def test_a_reply_passed_through_is_not_looked_at() -> None:
    body = gzip.compress(b'{"choices":[{"logprobs":{"token_logprobs":[NaN]}}]}')
    raw = reply(body, headers=[(b"content-encoding", b"gzip")])
    async with run_upstream(answering(raw)) as upstream, sidecar(upstream.url) as running:
        answer = await say(running.url, post("/v1/embeddings", b"{}", b"connection: close"))
    assert answer.partition(b"\r\n\r\n")[2] == body


async def test_a_body_ended_by_the_connection_is_whole() -> None:
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + CLEAN
    async with run_upstream(saying(raw)) as upstream, sidecar(upstream.url) as running:
        for path in (COMPLETIONS, "/other"):
            answer = await running.client.post(path, json=ASKED)
            assert (answer.status_code, answer.content) == (200, CLEAN)


async def test_an_early_refusal_reaches_a_client_that_is_still_sending() -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.say(reply(b"no", b"413 Too Large", headers=[(b"connection", b"close")]))
        await peer.gone()

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with connected(running.url) as (reader, writer):
            writer.write(b"POST /up HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\nfirst")
            assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 413 ")


async def test_own_routes_answer_what_they_do_not_know_in_openais_shape() -> None:
    async with run_upstream(answering(reply())) as upstream, sidecar(upstream.url) as running:
        status, error = await error_of(running, "/health")
    assert (status, error["type"]) == (405, "invalid_request_error")
    assert upstream.seen == []


async def test_max_inflight_refuses_at_once_and_says_so() -> None:
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await release.wait()
        await peer.say(reply(CLEAN))

    async with run_upstream(script) as upstream, sidecar(upstream.url, max_inflight=1) as running:
        first = asyncio.create_task(running.client.post(COMPLETIONS, json=ASKED))
        await upstream.until(lambda: len(upstream.seen) == 1)
        answer = await running.client.post(COMPLETIONS, json=ASKED)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"
        release.set()
        assert (await running.client.post("/pause")).status_code == 200  # no generation
        assert (await first).content == CLEAN
        assert (await running.client.post(COMPLETIONS, json=ASKED)).content == CLEAN


@pytest.mark.parametrize("size", [1 << 13, 1 << 16, 1 << 20])
async def test_large_replies_are_whole_or_an_error(size: int) -> None:
    """Large bodies take a way of their own past the parser."""
    clean, bad = completion("-1.5", text="é" * size), completion("-1.5", "null", text="é" * size)
    last = reply(clean)[: -len(clean) // 2]

    async def script(peer: Peer) -> None:
        replies = [reply(clean), reply(clean) + b"stray", reply(bad), last]
        while await peer.request() is not None:
            await peer.say(replies[len(upstream.seen) - 1])
            if len(upstream.seen) == 4:
                return

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        for _ in range(2):
            assert (await running.client.post(COMPLETIONS, json=ASKED)).content == clean
        marked = await running.client.post(COMPLETIONS, json=ASKED)
        assert marked.headers["x-unscorable-tokens"] == "1"
        assert marked.json()["choices"][0]["text"] == "é" * size
        status, error = await error_of(running)
        assert (status, error["type"]) == (502, "upstream_protocol_error")
    assert [seen.connection for seen in upstream.seen[:3]] == [0, 0, 1]
