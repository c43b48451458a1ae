"""The client's side of a request: what uvicorn gives and takes. Shell; knows no policy."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from proxy.errors import ErrorType, SidecarError
from proxy.headers import Headers, connection_names, find

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection."""


@dataclass(slots=True)
class Call:
    """One request. ``target``: raw path and query without a /nan/… prefix, as sent upstream.

    ``waited``: seconds spent waiting for the client's body and for the upstream.
    """

    route: str
    method: bytes
    target: bytes
    headers: Headers
    request_id: bytes
    receive: Receive
    send: Send
    status: int = 0
    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0

    async def waiting(self, awaitable: Awaitable[T]) -> T:
        """Awaits something that is not the sidecar's own work."""
        began = time.perf_counter()
        try:
            return await awaitable
        finally:
            self.waited += time.perf_counter() - began

    async def timed(self, chunks: AsyncIterator[T]) -> AsyncIterator[T]:
        """The same chunks; the time each is waited for is not the sidecar's own."""
        while True:
            try:
                chunk = await self.waiting(anext(chunks))
            except StopAsyncIteration:
                return
            yield chunk

    async def body(self, limit: int) -> bytes:
        """The whole request body; raises SidecarError 413 over ``limit`` bytes, ClientGone."""
        return await self.waiting(self._read(limit))

    def declared_length(self, limit: int) -> int | None:
        """Of the request body; raises SidecarError 413 over ``limit`` bytes."""
        declared = find(self.headers, b"content-length")
        length = int(declared) if declared is not None else None
        if length is not None and length > limit:
            raise too_large(limit)
        return length

    def refuse_upgrade(self) -> None:
        """Raises SidecarError 400 where a body comes with an Upgrade (h2c, as Java's client asks for by default).

        uvicorn's parser takes what follows such a head for bytes of the other protocol: the body never arrives.
        """
        if find(self.headers, b"upgrade") is None or b"upgrade" not in connection_names(self.headers):
            return
        if find(self.headers, b"transfer-encoding") is None and not self.declared_length(sys.maxsize):
            return
        message = "a request with a body cannot ask for an Upgrade here: send it as plain HTTP/1.1"
        raise SidecarError(400, ErrorType.INVALID_REQUEST, message)

    async def _read(self, limit: int) -> bytes:
        self.declared_length(limit)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise too_large(limit)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        headers.append((b"content-length", b"%d" % len(body)))
        await self.start(status, headers)
        await self.write(body, more=False)

    async def answer_error(self, error: SidecarError) -> None:
        headers = [(b"content-type", b"application/json"), (b"x-request-id", self.request_id)]
        if error.retry_after is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after))
        # The rest of a body is read and thrown away: closing now would reset a client that is still sending, and it
        # would never see why. Only after a client that waits to be asked for its body, or a lost one, nothing follows.
        if find(self.headers, b"expect") is not None or find(self.headers, b"upgrade") is not None:
            headers.append((b"connection", b"close"))
        await self.answer(error.status, headers, error.body())

    async def until_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work``, during which the client sends nothing more; when it leaves, raises ClientGone."""
        task = asyncio.current_task()
        assert task is not None
        watch = _Watch(self.gone(), task)
        try:
            await work
        except asyncio.CancelledError:
            if not watch.over or task.uncancel():
                raise
            raise ClientGone from None
        finally:
            watch.close()

    async def until_gone_reading(self, work: Coroutine[Any, Any, None], watch: Coroutine[Any, Any, None]) -> None:
        """Likewise where the client may send more: ``watch`` reads it and returns when the client has left.

        What ``watch`` raises cancels ``work`` too.
        """
        task = asyncio.current_task()
        assert task is not None
        watching = asyncio.get_running_loop().create_task(watch)

        def leave(_: "asyncio.Task[None]") -> None:
            task.cancel()

        watching.add_done_callback(leave)
        try:
            await work
        except asyncio.CancelledError:
            if not watching.done() or task.uncancel():
                raise
            watching.result()  # raises what the watch raised
            raise ClientGone from None
        finally:
            watching.remove_done_callback(leave)
            watching.cancel()

    async def gone(self) -> None:
        """Returns when the client has left."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


class _Watch:
    """Cancels ``task`` when ``coroutine`` is through: as a task of its own would, without the cost of one.

    A task takes two turns of the loop to begin and to end, for every request; this takes none. ``coroutine`` may
    await nothing but futures.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], task: "asyncio.Task[Any]") -> None:
        self.over = False
        self._closed = False
        self._coroutine = coroutine
        self._task = task
        self._step()

    def close(self) -> None:
        self._closed = True
        self._coroutine.close()
        if not self.over:
            self._future.remove_done_callback(self._step)

    def _step(self, _: "asyncio.Future[Any] | None" = None) -> None:
        if self._closed:  # called back in the turn in which the work ended
            return
        try:
            self._future: asyncio.Future[Any] = self._coroutine.send(None)
            self._future.add_done_callback(self._step)
        except StopIteration:
            self.over = True
            self._task.cancel()


def too_large(limit: int) -> SidecarError:
    return SidecarError(
        413, ErrorType.TOO_LARGE, f"the request body is over {limit} bytes; raise SIDECAR_MAX_REQUEST_BYTES to send it"
    )
