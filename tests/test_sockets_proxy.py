"""What carries no logprobs goes through untouched, streamed both ways: on real sockets, byte for byte."""

import asyncio
import hashlib
import socket

import httpx
import pytest
from sidecars import ASKED, COMPLETIONS, UVLOOP, completion, connected, post, say, sidecar
from upstreams import END, Peer, ScriptedUpstream, answering, chunk, reply, run_upstream

from proxy.connection import Connection
from proxy.upstream import Upstream

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return UVLOOP


@pytest.mark.parametrize("method", [b"GET", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"POST", b"PROPFIND"])
async def test_method_and_raw_target_pass(method: bytes) -> None:
    targets = [b"/a%2Fb/%20?x=%20&y", b"/", b"//double//slash", b"/v1/models?q=a+b%2B&q=2", b"/%E2%82%AC;p=1/../x"]
    targets += [b"/v1/completions/", b"/v1/completions%2F", b"/HEALTH", b"/nan", b"/?nan/x"]
    async with run_upstream(answering(reply(b"made", b"201 Created"), close=True)) as upstream:
        async with sidecar(upstream.url) as running:
            for target in targets:
                answer = await say(
                    running.url, method + b" " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
                )
                assert answer.startswith(b"HTTP/1.1 201 Created\r\n")
                assert answer.endswith(b"\r\n\r\nmade")
    assert [(seen.method, seen.target) for seen in upstream.seen] == [(method, target) for target in targets]


async def test_a_path_of_the_upstream_url_comes_first() -> None:
    async with run_upstream(answering(reply())) as upstream, sidecar(upstream.url + "/deep/er/") as running:
        await running.client.get("/v1/models?x=1")
        await running.client.post(COMPLETIONS, json=ASKED)
    assert [seen.target for seen in upstream.seen] == [b"/deep/er/v1/models?x=1", b"/deep/er/v1/completions"]


async def test_request_headers_pass_in_order_and_those_of_the_hop_stay_behind() -> None:
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: sidecar.example\r\nX-Twice: 1\r\nAccept: a/b\r\nX-Twice: 2\r\n"
        b"Connection: close, X-Secret\r\nX-Secret: s\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\n"
        b"Proxy-Connection: x\r\nProxy-Authorization: p\r\n"
        b"Authorization: Bearer k\r\nX-Request-Id: mine\r\nAccept-Encoding: gzip\r\n"
        b"X-Latin: \xe9\r\nContent-Length: 2\r\n\r\n{}"
    )
    async with run_upstream(answering(reply())) as upstream, sidecar(upstream.url) as running:
        await say(running.url, head)
    host = upstream.url.removeprefix("http://").encode()
    expected = [
        (b"host", host),
        (b"x-twice", b"1"),
        (b"accept", b"a/b"),
        (b"x-twice", b"2"),
        (b"authorization", b"Bearer k"),
        (b"accept-encoding", b"gzip"),
        (b"x-latin", b"\xe9"),
    ]
    seen = upstream.seen[0]
    assert [pair for pair in seen.headers if pair[0] not in (b"content-length", b"x-request-id")] == expected
    assert (seen.all(b"content-length"), seen.all(b"x-request-id"), seen.body) == ([b"2"], [b"mine"], b"{}")


@pytest.mark.parametrize("path", ["/other", COMPLETIONS], ids=["passthrough", "generation"])
async def test_response_headers_pass_in_order_and_those_of_the_hop_stay_behind(path: str) -> None:
    own = [(b"set-cookie", b"a=1"), (b"x-b", b"2"), (b"set-cookie", b"c=3"), (b"server", b"vllm"), (b"date", b"now")]
    hop = [(b"connection", b"keep-alive, x-named"), (b"x-named", b"no"), (b"keep-alive", b"timeout=5")]
    async with run_upstream(answering(reply(b"{}", b"404 Not Found", headers=own + hop))) as upstream:
        async with sidecar(upstream.url) as running:
            answer = await running.client.post(path, json=ASKED)
    framing = (b"content-length", b"content-type", b"x-request-id")
    assert [pair for pair in answer.headers.raw if pair[0] not in framing] == own
    assert answer.headers.get_list("content-length") == ["2"]


async def test_a_length_named_by_connection_does_not_unframe_the_body() -> None:
    smuggled = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
    raw = post("/tokenize", smuggled, b"connection: close, content-length, x-request-id, host")
    async with run_upstream(answering(reply())) as upstream, sidecar(upstream.url) as running:
        await say(running.url, raw)
    assert [(seen.target, seen.body) for seen in upstream.seen] == [(b"/tokenize", smuggled)]


@pytest.mark.parametrize("path", ["/other", COMPLETIONS], ids=["passthrough", "generation"])
async def test_request_id_is_kept_or_made_and_sent_on(path: str) -> None:
    async with run_upstream(answering(reply(completion("-1.5")))) as upstream, sidecar(upstream.url) as running:
        kept = await running.client.post(path, json=ASKED, headers={"X-Request-Id": "mine-1"})
        made = [await running.client.post(path, json=ASKED) for _ in range(2)]
    sent = [seen.all(b"x-request-id") for seen in upstream.seen]
    assert sent[0] == [b"mine-1"]
    assert [len(ids) for ids in sent] == [1, 1, 1]
    assert len({ids[0] for ids in sent}) == 3
    if path == COMPLETIONS:
        returned = [answer.headers.get_list("x-request-id") for answer in (kept, *made)]
        assert returned == [[value.decode() for value in ids] for ids in sent]


async def test_head_is_answered_without_a_body() -> None:
    bare = b"HTTP/1.1 200 OK\r\ncontent-type: text/x\r\ncontent-length: 4711\r\n\r\n"
    async with run_upstream(answering(bare)) as upstream, sidecar(upstream.url) as running:
        answers = [await running.client.head("/file") for _ in range(2)]
    assert [(answer.status_code, answer.headers["content-length"], answer.content) for answer in answers] == [
        (200, "4711", b"")
    ] * 2
    assert [seen.method for seen in upstream.seen] == [b"HEAD", b"HEAD"]


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 204 No Content\r\n", b"HTTP/1.1 304 Not Modified\r\netag: 1\r\ncontent-length: 99\r\n"],
    ids=["204", "304"],
)
async def test_statuses_without_a_body_keep_the_connection(head: bytes) -> None:
    async with run_upstream(answering(head + b"\r\n")) as upstream, sidecar(upstream.url) as running:
        async with connected(running.url) as (reader, writer):
            for _ in range(2):
                writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.split(b"\r\n")[0] == head.split(b"\r\n")[0]
                assert b"transfer-encoding" not in answer
    assert len(upstream.seen) == 2


@pytest.mark.parametrize("path", ["/other", COMPLETIONS], ids=["passthrough", "generation"])
async def test_interim_replies_are_skipped(path: str) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: <x>\r\n\r\n"
    final = reply(completion("-1.5"))
    async with run_upstream(answering(interim + final)) as upstream, sidecar(upstream.url) as running:
        answers = [await running.client.post(path, json=ASKED) for _ in range(2)]
    assert [answer.content for answer in answers] == [completion("-1.5")] * 2
    assert ["link" in answer.headers for answer in answers] == [False, False]


async def test_expect_continue_is_answered_by_the_sidecar() -> None:
    async with run_upstream(answering(reply(b"done"))) as upstream, sidecar(upstream.url) as running:
        async with connected(running.url) as (reader, writer):
            writer.write(b"PUT /x HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"body")
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200 OK\r\n")
    assert (upstream.seen[0].body, upstream.seen[0].all(b"expect")) == (b"body", [])


async def test_chunks_of_an_upload_are_passed_on_before_the_next_is_sent() -> None:
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def script(peer: Peer) -> None:
        head = await peer.head()
        assert head is not None
        assert (head.all(b"transfer-encoding"), head.all(b"content-length")) == ([b"chunked"], [])
        async for piece in peer.body(head):
            arrived.put_nowait(piece)
        await peer.say(reply(b"all"))

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with connected(running.url) as (reader, writer):
            writer.write(b"POST /up HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            for number in range(5):
                writer.write(chunk(b"piece %d" % number))
                assert await arrived.get() == b"piece %d" % number
            writer.write(END)
            assert (await reader.readuntil(b"all")).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("framing", ["chunked", "length", "until_close"])
async def test_chunks_of_a_download_are_passed_on_before_the_next_is_sent(framing: str) -> None:
    more = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        head = {"chunked": b"transfer-encoding: chunked", "length": b"content-length: 35", "until_close": b"x: y"}
        await peer.say(b"HTTP/1.1 200 OK\r\n" + head[framing] + b"\r\n\r\n")
        for number in range(5):
            await more.wait()
            more.clear()
            piece = b"piece %d" % number
            await peer.say(chunk(piece) if framing == "chunked" else piece)
        if framing == "chunked":
            await peer.say(END)

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with running.client.stream("GET", "/down") as answer:
            pieces = answer.aiter_raw()
            for number in range(5):
                more.set()
                assert await anext(pieces) == b"piece %d" % number
            assert [piece async for piece in pieces] == []


async def test_a_slow_upstream_reader_holds_the_upload_back(monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytes(range(256)) * (1 << 16)  # 16 MiB
    stalled = asyncio.Event()
    buffered: list[int] = []
    write, pause = Connection.write, Connection.pause_writing

    def watched_write(self: Connection, data: bytes) -> None:
        write(self, data)
        buffered.append(self._transport.get_write_buffer_size())

    def watched_pause(self: Connection) -> None:
        pause(self)
        stalled.set()

    monkeypatch.setattr(Connection, "write", watched_write)
    monkeypatch.setattr(Connection, "pause_writing", watched_pause)

    async def script(peer: Peer) -> None:
        head = await peer.head()
        assert head is not None
        await stalled.wait()  # reads nothing until the sidecar has to hold the client back
        digest = hashlib.sha256(b"".join([piece async for piece in peer.body(head)])).hexdigest()
        await peer.say(reply(digest.encode()))

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        answer = await running.client.post("/upload", content=body)
    assert answer.text == hashlib.sha256(body).hexdigest()
    assert max(buffered) < 1 << 20


async def test_a_slow_client_holds_the_download_back(monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytes(range(256)) * (1 << 16)  # 16 MiB
    paused = asyncio.Event()
    pause = Connection.pause

    def watched_pause(self: Connection) -> None:
        pause(self)
        paused.set()

    monkeypatch.setattr(Connection, "pause", watched_pause)
    async with run_upstream(answering(reply(body))) as upstream, sidecar(upstream.url) as running:
        async with connected(running.url) as (reader, writer):
            writer.write(b"GET /down HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            await paused.wait()  # the client has read nothing, so the sidecar has stopped to read as well
            transport = upstream.peers[0].writer.transport
            assert transport.get_write_buffer_size() > 0  # and the upstream is held back
            assert (await reader.read()).partition(b"\r\n\r\n")[2] == body


async def hold(peer: Peer) -> None:
    """Takes a request and never answers."""
    await peer.request()
    await peer.gone()


async def hold_inside(peer: Peer) -> None:
    """Begins a reply and never ends it."""
    await peer.request()
    await peer.say(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
    await peer.gone()


@pytest.mark.parametrize("path", ["/other", COMPLETIONS], ids=["passthrough", "generation"])
@pytest.mark.parametrize("script", [hold, hold_inside])
async def test_a_client_that_leaves_closes_the_upstream(path: str, script: object) -> None:
    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:  # type: ignore[arg-type]
        async with connected(running.url) as (_, writer):
            writer.write(post(path, b"{}"))
            await upstream.until(lambda: len(upstream.seen) == 1)
        await upstream.peers[0].closed.wait()
        await running.settled()
        assert running.metric("client_disconnects_total") == 1.0
        route = path if path == COMPLETIONS else "other"
        begun = script is hold_inside and path != COMPLETIONS  # a whole reply's head waits for its body
        code = "200" if begun else "499"
        assert running.metric("requests_total", route=route, code=code) == 1.0
    assert len(upstream.seen) == 1


async def test_a_client_that_leaves_in_its_upload_closes_the_upstream() -> None:
    arrived = asyncio.Event()

    async def script(peer: Peer) -> None:
        head = await peer.head()
        assert head is not None
        async for _ in peer.body(head):
            arrived.set()

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with connected(running.url) as (_, writer):
            writer.write(b"POST /up HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"begun"))
            await arrived.wait()
        await upstream.peers[0].closed.wait()


async def test_an_upload_held_back_when_its_client_left_never_ends_as_if_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stalled, left = asyncio.Event(), asyncio.Event()
    pause = Connection.pause_writing

    def watched_pause(self: Connection) -> None:
        pause(self)
        stalled.set()

    monkeypatch.setattr(Connection, "pause_writing", watched_pause)

    async def script(peer: Peer) -> None:
        head = await peer.head()
        assert head is not None
        await left.wait()
        async for _ in peer.body(head):  # raises IncompleteReadError where the connection ends inside the body
            pass
        raise AssertionError("the upload came to an end")

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        async with connected(running.url) as (_, writer):
            # Chunk by chunk, so that nothing of the client's waits unread when it leaves.
            writer.write(b"POST /up HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            while not stalled.is_set():
                writer.write(chunk(b"x" * 65536))
                await writer.drain()
                await asyncio.sleep(0)
            writer.transport.abort()
        left.set()
        await upstream.peers[0].closed.wait()


async def test_idle_connections_are_reused_and_expire_by_themselves() -> None:
    assert Upstream("http://x")._idle_expiry < 5.0  # uvicorn's keep-alive, and so vLLM's
    async with run_upstream(answering(reply(completion("-1.5")))) as upstream, sidecar(upstream.url) as running:
        running.app.sidecar.upstream._idle_expiry = 0.2
        for _ in range(3):
            assert (await running.client.post(COMPLETIONS, json=ASKED)).status_code == 200
        assert [seen.connection for seen in upstream.seen] == [0, 0, 0]
        await asyncio.wait_for(upstream.peers[0].closed.wait(), 2)
        assert running.app.sidecar.upstream._idle == []


@pytest.mark.parametrize("connect_retries", [0, 2])
async def test_stale_connections_never_surface(connect_retries: int) -> None:
    """Five kept connections, and the server has closed each just as the next request arrives on it."""
    together = asyncio.Barrier(5)

    async def script(peer: Peer) -> None:
        await peer.request()
        if peer.number < 5:
            await together.wait()
        await peer.say(reply(completion("-1.5")))
        if await peer.head() is not None:
            peer.reset()

    async with run_upstream(script) as upstream, sidecar(upstream.url, connect_retries=connect_retries) as running:
        posts = [running.client.post(COMPLETIONS, json=ASKED) for _ in range(5)]
        assert [answer.status_code for answer in await asyncio.gather(*posts)] == [200] * 5
        assert len(running.app.sidecar.upstream._idle) == 5
        answer = await running.client.post(COMPLETIONS, json=ASKED)
    assert (answer.status_code, answer.content) == (200, completion("-1.5"))


@pytest.mark.parametrize("call", ["/pause?mode=keep", "/resume", "/update_weights", "/collective_rpc", "/v1/models"])
async def test_a_control_call_is_sent_exactly_once(call: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with run_upstream(script) as upstream, sidecar(upstream.url, connect_retries=5) as running:
        answer = await running.client.post(call, json={"a": 1})
    assert answer.status_code == 502
    assert answer.json()["error"]["type"] == "upstream_unreachable"
    assert [seen.target for seen in upstream.seen] == [call.encode()]


async def test_a_control_call_never_goes_out_on_a_kept_connection() -> None:
    async with run_upstream(answering(reply(completion("-1.5")))) as upstream, sidecar(upstream.url) as running:
        await running.client.post(COMPLETIONS, json=ASKED)
        await running.client.post("/pause")
    assert [seen.connection for seen in upstream.seen] == [0, 1]


async def test_there_is_no_read_deadline_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    release = asyncio.Event()
    deadlines: list[float | None] = []
    timeout = asyncio.timeout

    def watched(delay: float | None) -> asyncio.Timeout:
        deadlines.append(delay)
        return timeout(delay)

    async def script(peer: Peer) -> None:
        await peer.request()
        await release.wait()
        await peer.say(reply(completion("-1.5")))

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        monkeypatch.setattr(asyncio, "timeout", watched)
        async with connected(running.url) as (reader, writer), connected(running.url) as (other, second):
            writer.write(post(COMPLETIONS, b"{}"))
            second.write(post("/pause", b"{}"))
            await upstream.until(lambda: len(upstream.seen) == 2)
            release.set()
            assert (await reader.readuntil(b"\r\n")) == (await other.readuntil(b"\r\n")) == b"HTTP/1.1 200 OK\r\n"
    assert deadlines == [10.0, 10.0]  # of the two connections


@pytest.mark.parametrize("path", ["/other", COMPLETIONS], ids=["passthrough", "generation"])
async def test_a_read_timeout_counts_silence_not_the_whole_reply(path: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        body = completion("-1.5")
        await peer.say(reply(body)[: -len(body)])
        for at in range(0, len(body), 30):
            await asyncio.sleep(0.05)
            await peer.say(body[at : at + 30])

    async with run_upstream(script) as upstream, sidecar(upstream.url, read_timeout=0.3) as running:
        answer = await running.client.post(path, json=ASKED)
    assert (answer.status_code, answer.content) == (200, completion("-1.5"))


@pytest.mark.parametrize("path", ["/other", COMPLETIONS], ids=["passthrough", "generation"])
async def test_silence_over_the_read_timeout_is_a_504(path: str) -> None:
    async with run_upstream(hold) as upstream, sidecar(upstream.url, read_timeout=0.1) as running:
        answer = await running.client.post(path, json=ASKED)
        await upstream.peers[0].closed.wait()
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "upstream_timeout")
    assert len(upstream.seen) == 1


@pytest.mark.parametrize("path", ["/other", COMPLETIONS], ids=["passthrough", "generation"])
@pytest.mark.parametrize("framing", ["declared", "chunked"])
async def test_a_request_over_the_limit_is_a_413_that_the_client_can_read(path: str, framing: str) -> None:
    """8 MiB fill every socket buffer: a server that closed after its 413 would reset the client instead."""
    body = b"x" * (8 << 20)
    async with run_upstream(answering(reply())) as upstream:
        async with sidecar(upstream.url, max_request_bytes=1000) as running, connected(running.url) as (reader, writer):
            declared = b"content-length: %d" % len(body)
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\n".encode()
            writer.write(head + (declared if framing == "declared" else b"transfer-encoding: chunked") + b"\r\n\r\n")
            writer.write(body if framing == "declared" else chunk(body) + END)
            await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\n")
            error = await reader.readuntil(b"}}")
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b'"type":"request_too_large"' in error
            assert b"1000 bytes" in error
            assert b"SIDECAR_MAX_REQUEST_BYTES" in error
            writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")  # the connection is still good
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert upstream.seen == []


async def test_a_request_at_the_limit_passes() -> None:
    async with run_upstream(answering(reply())) as upstream, sidecar(upstream.url, max_request_bytes=1000) as running:
        answers = [await running.client.post("/x", content=b"x" * size) for size in (1000, 1001)]
    assert [answer.status_code for answer in answers] == [200, 413]
    assert len(upstream.seen) == 1


async def test_expect_continue_over_the_limit_closes_instead_of_waiting_for_the_body() -> None:
    async with run_upstream(answering(reply())) as upstream, sidecar(upstream.url, max_request_bytes=10) as running:
        answer = await say(
            running.url, b"PUT /x HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 11\r\n\r\n"
        )
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "body", [b"{not json", b"\xff\xfe", b"[1]", b"", b'"a"'], ids=["broken", "bytes", "list", "empty", "str"]
)
async def test_a_request_that_is_no_json_object_is_vllms_to_judge(body: bytes) -> None:
    refusal = b'{"error":{"message":"vLLM says no"}}'
    async with run_upstream(answering(reply(refusal, b"422 Unprocessable Entity"))) as upstream:
        async with sidecar(upstream.url) as running:
            answer = await running.client.post(COMPLETIONS, content=body)
    assert (answer.status_code, answer.content) == (422, refusal)
    assert [seen.body for seen in upstream.seen] == [body]


@pytest.mark.parametrize(
    ("setting", "prefix", "header", "mark"),
    [
        (None, "", None, "9999.0"),
        ("null", "", None, "null"),
        ("null", "/nan/literal", None, "NaN"),
        ("null", "/nan/literal", "string", '"NaN"'),
        (None, "", "literal", "NaN"),
        ("string", "/nan/ceiling", None, "9999.0"),
        ("string", "/nan/n%75ll", None, "null"),
    ],
)
async def test_encodings(setting: str | None, prefix: str, header: str | None, mark: str) -> None:
    settings = {} if setting is None else {"nan_encoding": setting}
    headers = {} if header is None else {"X-Nan-Encoding": header}
    async with run_upstream(answering(reply(completion("-1.5", "null")))) as upstream:
        async with sidecar(upstream.url, **settings) as running:
            answer = await running.client.post(prefix + COMPLETIONS, json=ASKED, headers=headers)
    assert f'"token_logprobs":[-1.5,{mark}]' in answer.text
    assert answer.headers["x-unscorable-tokens"] == "1"
    assert upstream.seen[0].target == b"/v1/completions"
    assert upstream.seen[0].all(b"x-nan-encoding") == []


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/nan/nul/v1/completions", {}), (COMPLETIONS, {"X-Nan-Encoding": "zero"}), ("/nan/nul/v1/models", {})],
    ids=["prefix", "header", "prefix_elsewhere"],
)
async def test_an_unknown_encoding_is_a_400_naming_the_four(path: str, headers: dict[str, str]) -> None:
    async with run_upstream(answering(reply())) as upstream, sidecar(upstream.url) as running:
        answer = await running.client.post(path, json=ASKED, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert sorted(error) == ["code", "message", "param", "type"]
    assert all(name in error["message"] for name in ("ceiling", "literal", "string", "null"))
    assert upstream.seen == []


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/metrics", "/sidecar/status", "/sidecar/incidents"])
async def test_own_routes_answer_under_an_encoding_prefix_too(path: str) -> None:
    async with run_upstream(answering(reply(b"ok"))) as upstream, sidecar(upstream.url) as running:
        answers = [await running.client.get(prefix + path) for prefix in ("", "/nan/literal")]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].headers["content-type"] == answers[1].headers["content-type"]


async def test_a_prefix_is_taken_off_what_passes_through() -> None:
    async with run_upstream(answering(reply())) as upstream, sidecar(upstream.url) as running:
        await running.client.get("/nan/string/v1/models%2F?a=/nan/null/")
    assert upstream.seen[0].target == b"/v1/models%2F?a=/nan/null/"


async def test_upstream_metrics_are_vllms_own() -> None:
    text = b"# TYPE vllm:x counter\nvllm:x 1.0\n"
    async with run_upstream(answering(reply(text, kind=b"text/plain; version=0.0.4"))) as upstream:
        async with sidecar(upstream.url) as running:
            answer = await running.client.get("/sidecar/upstream-metrics")
    assert (answer.content, upstream.seen[0].target) == (text, b"/metrics")


async def test_trailers_do_not_become_headers() -> None:
    body = completion("-1.5")
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\ntrailer: x-late\r\n\r\n"
    raw = head + chunk(body) + b"0\r\nx-late: 1\r\n\r\n"
    async with run_upstream(answering(raw)) as upstream, sidecar(upstream.url) as running:
        answer = await running.client.post(COMPLETIONS, json=ASKED)
    assert answer.content == body
    assert (answer.headers.get_list("content-length"), "x-late" in answer.headers) == ([str(len(body))], False)


async def test_a_second_reply_nobody_asked_for_reaches_nobody() -> None:
    first, second = completion("-1.5", text="mine"), completion("-2.5", text="not mine")
    async with run_upstream(answering(reply(first) + reply(second), reply(first))) as upstream:
        async with sidecar(upstream.url) as running:
            answers = [await running.client.post(COMPLETIONS, json=ASKED) for _ in range(3)]
    assert [answer.content for answer in answers] == [first] * 3


async def test_a_header_that_lies_in_two_packets_is_one_header() -> None:
    raw = reply(completion("-1.5"), headers=[(b"x-long", b"v" * 100)])

    async def script(peer: Peer) -> None:
        peer.writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await peer.request()
        for at in range(len(raw)):
            await peer.say(raw[at : at + 1])
            await asyncio.sleep(0)

    async with run_upstream(script) as upstream, sidecar(upstream.url) as running:
        for path in ("/other", COMPLETIONS):
            answer = await running.client.post(path, json=ASKED)
            assert (answer.content, answer.headers.get_list("x-long")) == (completion("-1.5"), ["v" * 100])


async def test_a_client_keeps_its_connection_over_many_kinds_of_requests() -> None:
    async def calls(upstream: ScriptedUpstream, client: httpx.AsyncClient) -> list[int]:
        wanted = [("GET", "/x"), ("POST", COMPLETIONS), ("GET", "/livez"), ("POST", "/nan/x/y"), ("HEAD", "/x")]
        return [(await client.request(method, path, json=ASKED)).status_code for method, path in wanted]

    async with run_upstream(answering(reply(completion("-1.5")), close=True)) as upstream:
        async with (
            sidecar(upstream.url) as running,
            httpx.AsyncClient(base_url=running.url, trust_env=False, limits=httpx.Limits(max_connections=1)) as client,
        ):
            assert await calls(upstream, client) == [200, 200, 200, 400, 200]


@pytest.mark.parametrize("path", ["/other", COMPLETIONS], ids=["passthrough", "generation"])
async def test_an_upgrade_that_would_lose_the_body_is_refused(path: str) -> None:
    upgrade = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQ")
    async with run_upstream(answering(reply(completion("-1.5")))) as upstream, sidecar(upstream.url) as running:
        answer = await say(running.url, post(path, b"{}", *upgrade))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"type":"invalid_request_error"' in answer
        bare = b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        async with connected(running.url) as (reader, writer):
            writer.write(bare)
            assert (await reader.readuntil(b"\r\n")) == b"HTTP/1.1 200 OK\r\n"
    assert [(seen.target, seen.all(b"upgrade")) for seen in upstream.seen] == [(b"/x", [])]
