"""One request and its reply over one connection (proxy.connection). Shell; knows no policy.

Written for the hot path, where general clients cost more than all else the sidecar does (benchmarks/README.md). It
decompresses nothing, follows nothing, and tells apart how an attempt failed (proxy.errors).
"""

import asyncio
from collections.abc import AsyncIterator

from proxy.connection import Connection, Pool
from proxy.errors import TimedOut, UpstreamFailure
from proxy.headers import Headers, find
from proxy.memory import room

# Bytes that may wait for a slow client before reading from the upstream pauses.
_HIGH_WATER = 1 << 18
# Bytes from which a body is read into its place: what the parser copies costs more than a reply then.
_LARGE = 1 << 16
# Most that is believed of a content-length before its bytes are there.
_LARGEST = 1 << 28


class Exchange:
    """One request and its reply. ``close`` it always: a finished one gives its connection back, else it is cut."""

    def __init__(
        self, pool: Pool, connection: Connection, read_timeout: float | None, *, bodiless: bool, once: bool
    ) -> None:
        self.status = 0
        self.headers: Headers = []
        self._pool = pool
        self._connection = connection
        self._read_timeout = read_timeout
        self.bodiless = bodiless
        self._once = once
        self._whole = not once  # replies to generations are read whole where they are JSON
        self.reused = connection.idle_since > 0.0  # so the server may have been closing it
        self.started = False  # the head of the reply is here
        self.finished = False
        self.keep_alive = False
        self._body: bytearray | None = None  # where a large body is read whole
        self.failure: UpstreamFailure | None = None
        self._chunks: list[bytes] = []
        self._waiting = 0
        self._collecting = False
        self._waiter: asyncio.Future[None] | None = None

    async def head(self) -> None:
        """Returns when ``status`` and ``headers`` are known; raises UpstreamFailure."""
        while not self.started:
            await self._wait()

    async def read(self) -> bytes | bytearray:
        """The whole body."""
        self._collecting = True
        self._connection.resume()
        while not self.finished:
            await self._wait()
        return self._take() if self._body is None else self._body

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

    def place(self, length: int) -> memoryview | None:
        """Where a body of ``length`` bytes is to be read into; None: ``add`` takes it."""
        if not (self._whole and _LARGE < length <= _LARGEST and self._is_json()):
            return None
        self._body = room(length)
        return memoryview(self._body)

    def add(self, data: bytes) -> None:
        self._chunks.append(data)
        self._waiting += len(data)
        if not self._collecting:
            if self._waiting > _HIGH_WATER:
                self._connection.pause()
            self.wake()
        else:
            self.grew()

    def grew(self) -> None:
        """More of a body that is read into its place has come."""
        if self._read_timeout is not None:  # silence is timed, not the whole body
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

    def _is_json(self) -> bool:
        """Whether ``read`` and not ``chunks`` will ask for the body."""
        return (find(self.headers, b"content-type") or b"").startswith(b"application/json")

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
