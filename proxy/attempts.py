"""One attempt of a generation: send, wait, classify. Shell; decides nothing (proxy.recovery does)."""

import secrets
from dataclasses import dataclass
from typing import Any, cast

from proxy import jsonbody
from proxy.api import Api
from proxy.asgi import Call
from proxy.assemble import Assembly, AssemblyError, stream_request
from proxy.errors import BadReply, ClosedEarly, Cut, TimedOut, Unreachable, UpstreamFailure
from proxy.exchange import Exchange
from proxy.headers import Headers, end_to_end, find, without
from proxy.recovery import Cause
from proxy.sse import Parser
from proxy.upstream import Request, Upstream

# Headers of the request that go no further or go as something else.
_REPLACED = frozenset((b"host", b"content-length", b"accept-encoding", b"x-request-id", b"x-nan-encoding"))
_CAUSES: dict[type[UpstreamFailure], Cause] = {
    Unreachable: Cause.UNREACHABLE,
    ClosedEarly: Cause.CLOSED_EARLY,
    Cut: Cause.CUT,
    TimedOut: Cause.TIMED_OUT,
    BadReply: Cause.BAD_REPLY,
}


def cause_of(failure: UpstreamFailure) -> Cause:
    return _CAUSES[type(failure)]


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply. ``runaway``: choices were cut because they had turned to NaN for good.

    A large ``body`` of a 200 is a bytearray, which nobody changes: bytes would be one more copy.
    """

    status: int
    headers: Headers
    body: bytes
    runaway: bool = False

    @property
    def content_type(self) -> bytes:
        return find(self.headers, b"content-type") or b""


class Attempt:
    """What is sent: the client's request, once as it came, later with another body."""

    def __init__(self, call: Call, upstream: Upstream) -> None:
        self._call = call
        self._upstream = upstream
        self._headers = end_to_end(call.headers, _REPLACED)
        self._headers += [(b"accept-encoding", b"identity"), (b"x-request-id", call.request_id)]

    async def send(self, body: bytes, *, fresh: bool = False) -> Exchange:
        """Returns when the reply's head is there; raises UpstreamFailure. ``fresh``: on a new connection."""
        headers = [*self._headers, (b"content-length", b"%d" % len(body))]
        request = Request(self._call.method, self._call.target, headers, body)
        exchange = await self._upstream.send(request, fresh=fresh)
        try:
            await exchange.head()
            return exchange
        except ClosedEarly:
            exchange.close()
            if not exchange.reused:
                raise
        except BaseException:
            exchange.close()
            raise
        # The server was closing the kept connection as the request came: no attempt of the ladder's. Once at most.
        return await self.send(body, fresh=True)

    async def reassembled(self, api: Api, request: dict[str, Any], runaway_tokens: int) -> Reply:
        """The reply to ``request`` fetched as a stream; raises UpstreamFailure or AssemblyError."""
        streamed = stream_request(api, request)
        assert streamed is not None
        exchange = await self.send(jsonbody.dumps(streamed))
        try:
            if exchange.status != 200 or not is_stream(exchange):
                text = (await exchange.read())[:500].decode("utf-8", "replace")
                raise AssemblyError(f"the repeat as a stream got HTTP {exchange.status}: {text}")
            assembly = Assembly(api, request)
            runaway = await _fold(exchange, assembly, runaway_tokens)
            headers = [(b"content-type", b"application/json"), *without(exchange.headers, b"content-type")]
            return Reply(200, headers, assembly.reply(), runaway)
        finally:
            exchange.close()


async def _fold(exchange: Exchange, assembly: Assembly, runaway_tokens: int) -> bool:
    """Feeds the stream; True if it was cut because every open choice is unscorable for good."""
    parser = Parser()
    async for chunk in exchange.chunks():
        for frame in parser.feed(chunk):
            if not frame.data:
                continue
            if frame.data == b"[DONE]":
                assembly.done()
                return False
            assembly.feed(frame.data)
            if assembly.runaway(runaway_tokens):
                assembly.abort_open()
                return True
    return False


def is_stream(exchange: Exchange) -> bool:
    """Raises BadReply where a stream comes in a content coding."""
    if _media_type(exchange.headers) != b"text/event-stream":
        return False
    _refuse_coding(exchange.headers)
    return True


async def read_reply(exchange: Exchange) -> Reply:
    """The whole reply; raises UpstreamFailure, BadReply too where a 200 is no plain JSON."""
    body = await exchange.read()
    reply = Reply(exchange.status, exchange.headers, cast(bytes, body) if exchange.status == 200 else bytes(body))
    if reply.status == 200:
        _refuse_coding(reply.headers)
        if _media_type(reply.headers) != b"application/json":
            raise BadReply(f"the upstream answered with content-type {reply.content_type!r}, not application/json")
    return reply


def _media_type(headers: Headers) -> bytes:
    return (find(headers, b"content-type") or b"").partition(b";")[0].strip().lower()


def _refuse_coding(headers: Headers) -> None:
    coding = find(headers, b"content-encoding")
    if coding not in (None, b"identity"):
        raise BadReply(f"the upstream answered in content-encoding {coding!r} though asked for identity")


def with_fresh_salt(body: dict[str, Any]) -> dict[str, Any]:
    """The same request past any cached prefix; tokens and seed do not depend on the salt."""
    return body | {"cache_salt": secrets.token_hex(16)}
