"""`logprob-sidecar serve` as a process: its one line, its exit codes, the drain, the workers, its memory."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from sidecars import ASKED, COMPLETIONS, DONE, UVLOOP, completion, connected, event
from upstreams import END, STREAM_HEAD, Peer, answering, chunk, reply, run_upstream

from proxy.cli import main

pytestmark = pytest.mark.anyio

CLEAN = completion("-1.5")
MIB = 1 << 20


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return UVLOOP


@dataclass(frozen=True, slots=True)
class Serving:
    url: str
    line: str
    process: asyncio.subprocess.Process
    client: httpx.AsyncClient

    async def end(self) -> int:
        """Exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()

    async def refuses(self) -> None:
        """Returns when no new connection is taken."""
        host, port = self.url.removeprefix("http://").split(":")
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.02)

    def peak_memory(self) -> int:
        """Bytes of RAM it has held at most."""
        status = Path(f"/proc/{self.process.pid}/status").read_text("ascii")
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


@asynccontextmanager
async def serving(*options: str, **environment: str) -> AsyncIterator[Serving]:
    command = [sys.executable, "-m", "proxy", "serve", "--port", "0", "--log-level", "critical", *options]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ | environment
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = (await process.stdout.readline()).decode()
        url = re.search(r"http://127.0.0.1:\d+", line)
        assert url is not None, (await process.stderr.read()).decode()
        async with httpx.AsyncClient(base_url=url.group(), timeout=20, trust_env=False, verify=False) as client:
            yield Serving(url.group(), line, process, client)
    finally:
        if process.returncode is None:
            process.kill()
        rest, errors = await process.communicate()
        assert (rest, errors) == (b"", b"")  # one line on stdout was all


class Gate:
    """An upstream whose replies wait: streams after their first event, others before their head."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def script(self, peer: Peer) -> None:
        while (seen := await peer.request()) is not None:
            streamed = b'"stream":true' in seen.body
            if streamed:
                await peer.say(STREAM_HEAD + chunk(event("-1.5")))
            opened, gone = asyncio.ensure_future(self.opened.wait()), asyncio.ensure_future(peer.gone())
            await asyncio.wait({opened, gone}, return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()
            if gone.done():
                return
            gone.cancel()
            await asyncio.wait({gone})
            await peer.say(chunk(event("-0.5") + DONE) + END if streamed else reply(CLEAN))


async def test_one_line_tells_the_url_and_the_environments_proxies_are_not_picked_up() -> None:
    names = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    dead = dict.fromkeys(names, "http://127.0.0.1:9")
    async with run_upstream(answering(reply(CLEAN))) as upstream:
        async with serving("--upstream", upstream.url, **dead, NO_PROXY="", no_proxy="") as running:
            assert running.line == f"logprob-sidecar on {running.url} in front of {upstream.url}\n"
            assert (await running.client.post(COMPLETIONS, json=ASKED)).content == CLEAN
            assert (await running.client.get("/v1/models")).content == CLEAN
            assert (await running.client.get("/health")).status_code == 200
            assert await running.end() == 0


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_sigterm_drains_and_exits_zero(workers: str) -> None:
    gate = Gate()
    async with run_upstream(gate.script) as upstream:
        async with serving("--upstream", upstream.url, "--workers", workers) as running:
            whole = asyncio.create_task(running.client.post(COMPLETIONS, json=ASKED))
            async with running.client.stream("POST", COMPLETIONS, json=ASKED | {"stream": True}) as answer:
                pieces = answer.aiter_raw()
                assert await anext(pieces) == event("-1.5")
                await upstream.until(lambda: len(upstream.seen) == 2)
                ended = asyncio.create_task(running.end())
                await running.refuses()
                assert not ended.done()
                gate.opened.set()
                assert b"".join([piece async for piece in pieces]) == event("-0.5") + DONE
            assert (await whole).content == CLEAN
            assert await ended == 0


async def test_a_drain_over_its_time_cuts_what_is_left_and_still_exits_zero() -> None:
    async with run_upstream(Gate().script) as upstream:
        async with serving("--upstream", upstream.url, "--drain-timeout", "0.2") as running:
            whole = asyncio.create_task(running.client.post(COMPLETIONS, json=ASKED))
            async with running.client.stream("POST", COMPLETIONS, json=ASKED | {"stream": True}) as answer:
                pieces = answer.aiter_raw()
                assert await anext(pieces) == event("-1.5")
                await upstream.until(lambda: len(upstream.seen) == 2)
                ended = asyncio.create_task(running.end())
                with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                    await anext(pieces)
            refused = await whole
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded")
            assert await ended == 0
        await upstream.until(lambda: all(peer.closed.is_set() for peer in upstream.peers))


async def test_a_second_ctrl_c_ends_the_drain() -> None:
    async with run_upstream(Gate().script) as upstream:
        async with serving("--upstream", upstream.url) as running:
            call = asyncio.create_task(running.client.post(COMPLETIONS, json=ASKED))
            await upstream.until(lambda: len(upstream.seen) == 1)
            running.process.send_signal(signal.SIGINT)
            await running.refuses()
            running.process.send_signal(signal.SIGINT)
            assert await running.process.wait() == 0
            assert (await call).status_code == 503


async def test_a_worker_that_dies_ends_the_whole_with_one() -> None:
    async with run_upstream(answering(reply(CLEAN))) as upstream:
        async with serving("--upstream", upstream.url, "--workers", "2") as running:
            assert running.line.endswith(f" in front of {upstream.url}, 2 workers\n")
            first, second = children(running.process.pid)
            posts = [running.client.post(COMPLETIONS, json=ASKED) for _ in range(16)]
            assert [answer.content for answer in await asyncio.gather(*posts)] == [CLEAN] * 16
            os.kill(first, signal.SIGKILL)
            assert await running.process.wait() == 1
            with pytest.raises(ProcessLookupError):
                os.kill(second, 0)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


async def test_sigterm_right_after_the_line_exits_zero() -> None:
    async with serving("--upstream", "http://127.0.0.1:9", "--workers", "2") as running:
        assert await running.end() == 0


def test_a_port_in_use_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--upstream", "http://x", "--port", port])
    told = f"logprob-sidecar: cannot listen on 127.0.0.1:{port} (--host, --port): Address already in use"
    assert ended.value.code == told  # Python prints it and exits 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "environment", "line"),
    [
        ([], {}, "--upstream (or SIDECAR_UPSTREAM) is required"),
        (["--upstream", "ftp://x"], {}, "--upstream: 'ftp://x': "),
        (["--upstream", "localhost:8000"], {}, "--upstream: 'localhost:8000': "),
        (["--upstream", "http://x:99999"], {}, "--upstream: 'http://x:99999': "),
        (["--upstream", "http://x", "--port", "70000"], {}, "--port: '70000': "),
        (["--upstream", "http://x", "--nan-encoding", "zero"], {}, "--nan-encoding: 'zero': "),
        (["--upstream", "http://x", "--workers", "0"], {}, "--workers: '0': "),
        (["--upstream", "http://x", "--on-unscorable", "drop"], {}, "--on-unscorable: 'drop': "),
        (["--upstream", "http://x", "--colour", "red"], {}, "--colour"),
        (["--upstream", "http://x", "extra"], {}, "extra"),
        (["--upstream", "http://x"], {"SIDECAR_PORT": "many"}, "SIDECAR_PORT: 'many': "),
        (["--upstream", "http://x"], {"SIDECAR_NAN_ENCODING": ""}, "SIDECAR_NAN_ENCODING: '': "),
        ([], {"SIDECAR_UPSTREAM": "x"}, "SIDECAR_UPSTREAM: 'x': "),
    ],
)
def test_a_bad_value_is_two_and_one_line(
    arguments: list[str],
    environment: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.startswith("logprob-sidecar serve: ")
    assert line in said.err
    assert said.err.count("\n") == 1
    assert said.err.endswith("\n")


async def test_memory_stays_bounded_while_either_side_is_slow() -> None:
    """32 MiB up to an upstream that reads late, 32 MiB down to a client that reads late: a few MiB are held."""
    size = 32 * MIB
    late = asyncio.Event()

    async def script(peer: Peer) -> None:
        head = await peer.head()
        assert head is not None
        if head.method == b"POST":
            await late.wait()
            got = sum([len(piece) async for piece in in_pieces(peer.reader, size)])
            await peer.say(reply(b"%d" % got))
        else:
            await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
            for _ in range(32):
                await peer.say(b"x" * MIB)

    async with run_upstream(script) as upstream, serving("--upstream", upstream.url) as running:
        assert (await running.client.get("/livez")).status_code == 200
        before = running.peak_memory()
        async with connected(running.url) as (reader, writer):
            writer.write(b"POST /up HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
            asyncio.get_running_loop().call_later(0.3, late.set)  # no socket buffer takes it all meanwhile
            for _ in range(32):
                writer.write(b"x" * MIB)
                await writer.drain()
            assert (await reader.readuntil(b"%d" % size)).startswith(b"HTTP/1.1 200 OK\r\n")
        async with connected(running.url) as (reader, writer):
            writer.write(b"GET /down HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.3)  # long enough for a sidecar that does not wait to take it all
            assert sum([len(piece) async for piece in in_pieces(reader, size)]) == size
        assert running.peak_memory() - before < 8 * MIB
        assert await running.end() == 0


async def in_pieces(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await reader.read(min(size, 65536))
        assert piece
        size -= len(piece)
        yield piece
