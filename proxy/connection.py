"""A connection to the upstream: asyncio's transport and httptools' parser. Shell; knows no policy.

Small bodies go through the parser; the rest of a large one whose length is known is read into its place.
"""

import asyncio
from typing import Protocol, cast

import httptools

from proxy.errors import BadReply, ClosedEarly, Cut, UpstreamFailure
from proxy.headers import Headers


class Pool(Protocol):
    """Where a connection comes from and goes back to."""

    url: str
    scratch: memoryview  # where every connection reads what goes through its parser

    def give_back(self, connection: "Connection") -> None: ...

    def forget(self, connection: "Connection") -> None: ...


class Served(Protocol):
    """What a connection does its work for: an exchange."""

    status: int
    headers: Headers
    bodiless: bool
    started: bool
    finished: bool
    keep_alive: bool

    def place(self, length: int) -> memoryview | None: ...

    def add(self, data: bytes) -> None: ...

    def grew(self) -> None: ...

    def wake(self) -> None: ...

    def fail(self, failure: UpstreamFailure) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """A socket and its parser; speaks to the exchange it currently serves."""

    def __init__(self, pool: Pool) -> None:
        self.idle_since = 0.0
        self.usable = True
        self._pool = pool
        self._exchange: Served | None = None
        self._paused = False
        self._writable: asyncio.Future[None] | None = None
        self._place: memoryview | None = None  # of the rest of a body that goes past the parser

    def begin(self, exchange: Served) -> None:
        self._exchange = exchange
        self._headers: Headers = []
        self._sized = False
        self._place = None
        self._heard = False  # a byte of the reply has come
        self._parser = httptools.HttpResponseParser(self)
        if not self.usable:
            exchange.fail(ClosedEarly(f"{self._pool.url} closed the connection before it answered"))

    def end(self, exchange: Served) -> None:
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

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pool.scratch if self._place is None else self._place

    def buffer_updated(self, nbytes: int) -> None:
        exchange = self._exchange
        if exchange is None or exchange.finished:  # bytes nobody asked for
            self._exchange = None
            self._pool.forget(self)
            self.abort()
        elif self._place is None:
            self._parse(exchange, self._pool.scratch[:nbytes])
        else:
            self._place = self._place[nbytes:]
            if self._place:
                exchange.grew()
            else:
                self.on_message_complete()

    def _parse(self, exchange: Served, data: memoryview) -> None:
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
        length = _length(self._headers)
        self._sized = length is not None
        self._headers = []  # trailers are no headers
        exchange.started = True
        if exchange.bodiless:
            exchange.finished = True
        elif length:
            self._place = exchange.place(length)
        exchange.wake()

    def on_body(self, data: bytes) -> None:
        if self._place is not None:
            self._place[: len(data)] = data
            self._place = self._place[len(data) :]
        elif self._exchange is not None:
            self._exchange.add(data)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if not exchange.started:  # 1xx: the reply proper is still to come
            self._headers = []
            return
        self._place = None
        exchange.finished = True
        exchange.keep_alive = self._sized and self._parser.should_keep_alive()
        exchange.wake()


def _length(headers: Headers) -> int | None:
    """Bytes of the body; 0 where chunks tell its end, None where only the end of the connection does."""
    length = None
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding" and b"chunked" in value.lower():
            return 0
    return length
