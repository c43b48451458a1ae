"""The upstream: sends one attempt, keeps idle connections. Shell; knows no policy.

Target and headers go out as they came, the environment's proxies are not read, and there are as many connections as
requests in flight: nothing queues here.
"""

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.connection import Connection
from proxy.errors import Unreachable
from proxy.exchange import Exchange
from proxy.headers import Headers


@dataclass(frozen=True, slots=True)
class Request:
    """``target`` is the raw path and query, ``body`` whole, or None where it is streamed with ``Exchange.write``."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes | None


class Upstream:
    """The server at ``url`` and the idle connections to it.

    ``connect_timeout`` and ``read_timeout`` (between two reads; None: no limit) are seconds. ``idle_expiry`` stays
    below the 5 s after which uvicorn, and so vLLM, closes an idle connection.
    """

    def __init__(
        self, url: str, *, connect_timeout: float = 10.0, read_timeout: float | None = None, idle_expiry: float = 4.0
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").encode()
        self._netloc = parts.netloc.rpartition("@")[2].encode()
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._idle_expiry = idle_expiry
        self.scratch = memoryview(bytearray(1 << 17))
        self._idle: list[Connection] = []
        self._sweeper: asyncio.TimerHandle | None = None

    async def send(self, request: Request, *, fresh: bool = False) -> Exchange:
        """Writes the request; ``fresh`` takes a new connection, for what must be sent exactly once."""
        connection = None if fresh else self._take_idle()
        if connection is None:
            connection = await self._connect()
        bodiless = request.method == b"HEAD"
        exchange = Exchange(self, connection, self._read_timeout, bodiless=bodiless, once=fresh)
        connection.begin(exchange)
        head = [request.method, b" ", self._prefix, request.target, b" HTTP/1.1\r\nhost: ", self._netloc, b"\r\n"]
        for name, value in request.headers:
            head += (name, b": ", value, b"\r\n")
        head.append(b"\r\n")
        if request.body:
            head.append(request.body)
        connection.write(b"".join(head))
        return exchange

    async def connects(self) -> bool:
        """True if a connection can be made: a busy engine counts as reachable."""
        try:
            (await self._connect()).abort()
        except Unreachable:
            return False
        return True

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def give_back(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(self._idle_expiry, self._sweep)

    def forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def _take_idle(self) -> Connection | None:
        self._sweep_out()
        return self._idle.pop() if self._idle else None

    def _sweep_out(self) -> None:
        expired = asyncio.get_running_loop().time() - self._idle_expiry
        while self._idle and self._idle[0].idle_since <= expired:
            self._idle.pop(0).abort()

    def _sweep(self) -> None:
        self._sweep_out()
        self._sweeper = None
        if self._idle:
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_at(self._idle[0].idle_since + self._idle_expiry, self._sweep)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise Unreachable(f"no connection to {self.url} within {self._connect_timeout:g} s") from None
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name that DNS cannot hold
            raise Unreachable(f"no connection to {self.url}: {error}") from error
        return connection
