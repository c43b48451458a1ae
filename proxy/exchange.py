"""One exchange over one connection: asyncio transports and httptools' parser. Shell; knows no policy and no pool.

Written for the hot path, where general clients cost more than all else the sidecar does (benchmarks/README.md). It
decompresses nothing, follows nothing, and tells apart how an attempt failed (proxy.errors).
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol, cast

import httptools

from proxy.errors import BadReply, ClosedEarly, Cut, TimedOut, UpstreamFailure
from proxy.headers import Headers

# Bytes that may wait for a slow client before reading from the upstream pauses.
_HIGH_WATER = 1 << 18


class Pool(Protocol):
    """Where a connection comes from and goes back to."""

    url: str

    def give_back(self, connection: "Connection") -> None: ...

    def forget(self, connection: "Connection") -> None: ...


class Exchange:
    """One request and its reply. ``close`` it always: a finished one gives its connection back, else it is cut."""

    def __init__(
        self, pool: Pool, connection: "Connection", read_timeout: float | None, *, bodiless: bool, once: bool
    ) -> None:
        self.status = 0
        self.headers: Headers = []
        self._pool = pool
        self._connection = connection
        self._read_timeout = read_timeout
        self.bodiless = bodiless
        self._once = once
        self.reused = connection.idle_since > 0.0  # so the server may have been closing it
        self.started = False  # the head of the reply is here
        self.finished = False
        self.keep_alive = False
        self.failure: UpstreamFailure | None = None
        self._chunks: list[bytes] = []
        self._waiting = 0
        self._collecting = False
        self._waiter: asyncio.Future[None] | None = None

    async def head(self) -> None:
        """Returns when ``status`` and ``headers`` are known; raises UpstreamFailure."""
        while not self.started:
            await self._wait()

    async def read(self) -> bytes:
        """The whole body."""
        self._collecting = True
        self._connection.resume()
        while not self.finished:
            await self._wait()
        return self._take()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives; reading pauses while the consumer is slow."""
        while True:
            if self._chunks:
                yield self._take()
                self._connection.resume()
            elif self.finished:
                return
            else:
                await self._wait()

    async def write(self, data: bytes) -> None:
        """More of a streamed request body."""
        if self.failure is None:
            self._connection.write(data)
            await self._connection.drained()

    def close(self) -> None:
        connection = self._connection
        connection.end(self)
        if not self._once and self.finished and self.keep_alive and connection.usable:
            self._pool.give_back(connection)
        else:
            connection.abort()

    def fail(self, failure: UpstreamFailure) -> None:
        if self.failure is None and not self.finished:
            self.failure = failure
        self.wake()

    def add(self, data: bytes) -> None:
        self._chunks.append(data)
        self._waiting += len(data)
        if not self._collecting:
            if self._waiting > _HIGH_WATER:
                self._connection.pause()
            self.wake()
        elif self._read_timeout is not None:  # silence is timed, not the whole body
            self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take(self) -> bytes:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._waiting = 0
        return data

    async def _wait(self) -> None:
        if self.failure is not None:
            raise self.failure
        self._waiter = asyncio.get_running_loop().create_future()
        if self._read_timeout is None:
            await self._waiter
            return
        try:
            async with asyncio.timeout(self._read_timeout):
                await self._waiter
        except TimeoutError:
            raise TimedOut(f"{self._pool.url} sent nothing for {self._read_timeout:g} s") from None


class Connection(asyncio.Protocol):
    """A socket and its parser; speaks to the exchange it currently serves."""

    def __init__(self, pool: Pool) -> None:
        self.idle_since = 0.0
        self.usable = True
        self._pool = pool
        self._exchange: Exchange | None = None
        self._paused = False
        self._writable: asyncio.Future[None] | None = None

    def begin(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._headers: Headers = []
        self._sized = False
        self._heard = False  # a byte of the reply has come
        self._parser = httptools.HttpResponseParser(self)
        if not self.usable:
            exchange.fail(ClosedEarly(f"{self._pool.url} closed the connection before it answered"))

    def end(self, exchange: Exchange) -> None:
        if self._exchange is exchange:
            self._exchange = None
        self.resume()

    def write(self, data: bytes) -> None:
        if self.usable:
            self._transport.write(data)

    async def drained(self) -> None:
        if self._writable is not None:
            await self._writable

    def pause(self) -> None:
        if not self._paused and self.usable:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self.usable:
                self._transport.resume_reading()

    def abort(self) -> None:
        self.usable = False
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.finished:  # bytes nobody asked for
            self._exchange = None
            self._pool.forget(self)
            self.abort()
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            exchange.fail(BadReply(f"{self._pool.url} does not answer in HTTP: {error}"))
            self.abort()
        except httptools.HttpParserUpgrade:
            exchange.fail(BadReply(f"{self._pool.url} switched protocols"))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        self.resume_writing()
        self._pool.forget(self)
        exchange = self._exchange
        if exchange is None or exchange.finished:
            return
        if exchange.started and not self._sized and error is None:
            self.on_message_complete()  # a body that ends with the connection
        elif self._heard:
            exchange.fail(Cut(f"{self._pool.url} closed the connection inside its reply"))
        else:
            exchange.fail(ClosedEarly(f"{self._pool.url} closed the connection before it answered"))

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # httptools

    def on_message_begin(self) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.finished:  # a second reply that nobody asked for, in the same packet
            exchange.keep_alive = False
            self._exchange = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        exchange = self._exchange
        if exchange is None or (100 <= status < 200):
            return
        if status >= 600:
            raise ValueError(f"status {status} is no HTTP status")
        exchange.status, exchange.headers = status, self._headers
        self._sized = any(
            name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower())
            for name, value in self._headers
        )
        self._headers = []  # trailers are no headers
        exchange.started = True
        if exchange.bodiless:
            exchange.finished = True
        exchange.wake()

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.add(data)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if not exchange.started:  # 1xx: the reply proper is still to come
            self._headers = []
            return
        exchange.finished = True
        exchange.keep_alive = self._sized and self._parser.should_keep_alive()
        exchange.wake()
