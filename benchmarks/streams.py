"""Event streams: an upstream and its clients in one process, so that each event is sent when the last one has arrived.

Nothing coalesces and nothing queues beyond the streams themselves: what is measured is the way of one event through the
proxy, alone or among many. Upstream and clients share the load's core and bound what a fast proxy can show; the proxy's
CPU time an event is not bound by them.
"""

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any

import replies
import uvloop
from load import percentile
from stack import Process

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
    b"x-accel-buffering: no\r\n\r\n"
)
_REQUEST_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
_NUMBER = re.compile(rb'"user":\s*"(\d+)"')
_EVENTS = [replies.event(i) for i in range(64)]
_CHUNKS = [b"%x\r\n%b\r\n" % (len(event), event) for event in _EVENTS]
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Streamed:
    """``rate``: events/s of all; ``p50``, ``p99``, ``first``: ms from upstream to client; ``cpu``: seconds an event."""

    rate: float
    p50: float
    p99: float
    first: float
    cpu: float
    lost: int


@dataclass(slots=True)
class _Run:
    streams: int
    events: int
    pace: float  # seconds from one event's arrival to the next one's sending
    sent: list[float] = field(default_factory=list)
    senders: dict[int, Any] = field(default_factory=dict)
    firsts: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finished: int = 0
    lost: int = 0
    began: float = 0.0
    done: "asyncio.Future[None] | None" = None

    def end_one(self, complete: bool) -> None:
        self.finished += 1
        self.lost += not complete
        if self.finished == self.streams and self.done is not None and not self.done.done():
            self.done.set_result(None)


class _Server(asyncio.Protocol):
    """The upstream's side of one stream."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        number = _NUMBER.search(self._buffer)
        if number is None or not self._buffer.endswith(b"}"):
            return
        self._buffer = b""
        self._number, self._at = int(number[1]), 0
        self._run.senders[self._number] = self
        self._run.sent[self._number] = time.perf_counter()
        self._transport.write(_HEAD + _CHUNKS[0])

    def next_event(self) -> None:
        self._at += 1
        if self._at >= self._run.events:
            self._transport.write(_DONE)
            return
        self._run.sent[self._number] = time.perf_counter()
        self._transport.write(_CHUNKS[self._at & 63])


class _Client(asyncio.Protocol):
    def __init__(self, run: _Run, number: int) -> None:
        self._run = run
        self._number = number
        self._seen = 0
        self._ended = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        body = replies.STREAM_REQUEST[:-1] + b',"user":"%d"}' % self._number
        transport.write(_REQUEST_HEAD % len(body) + body)

    def data_received(self, data: bytes) -> None:
        run = self._run
        events = data.count(b"\n\n")
        if not events:
            return
        if b"[DONE]" in data:
            self._ended = True
            self._transport.close()
            return
        passed = (time.perf_counter() - run.sent[self._number]) * 1e3
        (run.times if self._seen else run.firsts).append(passed)
        self._seen += events
        sender = run.senders[self._number]
        if run.pace:
            asyncio.get_running_loop().call_later(run.pace, sender.next_event)
        else:
            sender.next_event()

    def connection_lost(self, _: Exception | None) -> None:
        self._run.end_one(self._ended and self._seen == self._run.events)


def measure(process: Process, streams_upstream: int, streams: int, events: int, pace: float = 0.0) -> Streamed:
    """``events`` events on each of ``streams`` streams through ``process``, whose upstream is ``streams_upstream``.

    With ``pace`` seconds between events, streams begin one after another, each while those before it go on; without,
    all at once, as fast as they can.
    """
    return uvloop.run(_measure(process, streams_upstream, streams, events, pace))


async def _measure(process: Process, upstream_port: int, streams: int, events: int, pace: float) -> Streamed:
    loop = asyncio.get_running_loop()
    run = _Run(streams, events, pace, [0.0] * streams, done=loop.create_future())
    server = await loop.create_server(
        lambda: _Server(run), "127.0.0.1", upstream_port, backlog=4096, reuse_address=True
    )
    before, began = process.cpu_seconds(), time.perf_counter()

    async def begin(number: int) -> None:
        await asyncio.sleep(number * pace * events / streams / 2)
        await loop.create_connection(lambda: _Client(run, number), "127.0.0.1", process.port)

    await asyncio.gather(*map(begin, range(streams)))
    assert run.done is not None
    await asyncio.wait_for(run.done, 120)
    seconds = time.perf_counter() - began
    server.close()
    total = len(run.times) + len(run.firsts)
    cpu = (process.cpu_seconds() - before) / total
    return Streamed(
        total / seconds,
        percentile(run.times, 0.5),
        percentile(run.times, 0.99),
        percentile(run.firsts, 0.5),
        cpu,
        run.lost,
    )
