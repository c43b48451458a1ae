"""A scripted upstream on a raw socket: says exactly the bytes it is told, records what it was sent, breaks anywhere.

A script is a coroutine function over one `Peer`, the connection that the sidecar opened; when it returns, the
connection is closed. `answering(...)` makes the scripts that most tests need.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

# Seconds after which a test that hangs fails: pytest-timeout's signal does not wake uvloop.
PATIENCE = 120

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it came: names as written, the body with its framing taken off."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes = b""
    connection: int = 0

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


class Peer:
    """One connection from the sidecar."""

    def __init__(self, number: int, upstream: "ScriptedUpstream", reader: asyncio.StreamReader) -> None:
        self.number = number
        self.reader = reader
        self.closed = asyncio.Event()  # the sidecar has closed it
        self._upstream = upstream

    def accept(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    async def head(self) -> Seen | None:
        """The head of the next request, None when no more come."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
            return None
        first, *lines = head[:-4].split(b"\r\n")
        method, target, _ = first.split(b" ")
        pairs = (line.split(b":", 1) for line in lines)
        return Seen(method, target, [(name, value.strip(b" ")) for name, value in pairs], connection=self.number)

    async def request(self) -> Seen | None:
        """The next request whole; recorded in `upstream.seen`."""
        head = await self.head()
        if head is None:
            return None
        body = b"".join([chunk async for chunk in self.body(head)])
        seen = Seen(head.method, head.target, head.headers, body, self.number)
        self._upstream.record(seen)
        return seen

    async def body(self, head: Seen) -> AsyncIterator[bytes]:
        """The body in the pieces it was framed in."""
        if head.all(b"transfer-encoding"):
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        elif length := int(b"".join(head.all(b"content-length")) or b"0"):
            yield await self.reader.readexactly(length)

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Returns when the sidecar has closed the connection; what it sends meanwhile is thrown away."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        self.closed.set()

    def reset(self) -> None:
        """Breaks the connection without a farewell."""
        self.writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


@dataclass(slots=True)
class ScriptedUpstream:
    url: str = ""
    peers: list[Peer] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self, seen: Seen) -> None:
        self.seen.append(seen)
        self.ring()

    def ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on connections and requests."""
        while not condition():
            await self._changed.wait()


@asynccontextmanager
async def run_upstream(script: Script, *, port: int = 0) -> AsyncIterator[ScriptedUpstream]:
    """Runs `script` for every connection; an error in a script is the test's."""
    upstream = ScriptedUpstream()
    tasks: list[asyncio.Task[None]] = []

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(len(upstream.peers), upstream, reader)
        peer.accept(writer)
        upstream.peers.append(peer)
        upstream.ring()
        try:
            await script(peer)
        except (ConnectionError, asyncio.IncompleteReadError):
            peer.closed.set()
        finally:
            writer.close()
            upstream.ring()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(converse(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", port, limit=1 << 20)
    host, port = server.sockets[0].getsockname()
    upstream.url = f"http://{host}:{port}"
    try:
        async with asyncio.timeout(PATIENCE):
            yield upstream
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


def answering(*replies: bytes, close: bool = False) -> Script:
    """A server that gives the replies in turn, over all connections; the last one again and again.

    `close`: it ends the connection after each.
    """
    left = list(replies)

    async def script(peer: Peer) -> None:
        while await peer.request() is not None:
            await peer.say(left.pop(0) if len(left) > 1 else left[0])
            if close:
                return

    return script


def reply(
    body: bytes = b"", status: bytes = b"200 OK", kind: bytes = b"application/json", headers: Headers | None = None
) -> bytes:
    """A reply with a content-length."""
    lines = [b"HTTP/1.1 " + status, b"content-type: " + kind, b"content-length: %d" % len(body)]
    lines += [name + b": " + value for name, value in headers or []]
    return b"\r\n".join([*lines, b"", body])


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(*events: bytes) -> bytes:
    """A whole chunked event stream."""
    return STREAM_HEAD + b"".join(map(chunk, events)) + END
