"""Many requests in flight: an upstream that answers late, and its clients, in one process."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import replies
import uvloop
from stack import Process

_BODY = replies.completion(128)
_REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (len(replies.REQUEST), replies.REQUEST)
)


@dataclass(frozen=True, slots=True)
class InFlight:
    """``per_request``: bytes of the proxy's resident memory each, the request's body taken off."""

    requests: int
    errors: int
    per_request: float
    seconds: float


class _Late(asyncio.Protocol):
    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._size = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}"):
            asyncio.get_running_loop().call_later(self._delay, self._transport.write, _REPLY)


class _Client(asyncio.Protocol):
    def __init__(self, done: "asyncio.Future[bool]") -> None:
        self._done = done
        self._got = bytearray()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(_REQUEST)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, blank, body = self._got.partition(b"\r\n\r\n")
        if blank and len(body) == len(_BODY) and not self._done.done():
            self._done.set_result(head.startswith(b"HTTP/1.1 200") and bytes(body) == _BODY)
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(False)


def measure(process: Process, upstream_port: int, requests: int, delay: float) -> InFlight:
    """``requests`` at once through ``process``; its upstream answers each ``delay`` seconds after it came."""
    return uvloop.run(_measure(process, upstream_port, requests, delay))


async def _measure(process: Process, upstream_port: int, requests: int, delay: float) -> InFlight:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Late(0.05), "127.0.0.1", upstream_port, backlog=4096)
    await _send(process, 8)  # imports and first allocations are no request's
    server.close()
    await server.wait_closed()
    server = await loop.create_server(lambda: _Late(delay), "127.0.0.1", upstream_port, backlog=4096)
    before, began = process.resident(), time.perf_counter()
    sending = asyncio.ensure_future(_send(process, requests))
    await asyncio.sleep(delay * 0.75)
    during = process.resident()
    errors = await sending
    server.close()
    each = (during - before) / requests - len(replies.REQUEST)
    return InFlight(requests, errors, each, time.perf_counter() - began)


async def _send(process: Process, requests: int) -> int:
    """Number of requests that did not get the whole reply."""
    loop = asyncio.get_running_loop()
    done = [loop.create_future() for _ in range(requests)]
    for future in done:
        await loop.create_connection(lambda future=future: _Client(future), "127.0.0.1", process.port)
    return sum(not good for good in await asyncio.gather(*done))
