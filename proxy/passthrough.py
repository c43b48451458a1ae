"""Everything that carries no logprobs: sent exactly once, streamed both ways, nothing looked at. Shell."""

from proxy.asgi import Call, too_large
from proxy.exchange import Exchange
from proxy.headers import end_to_end, find, without
from proxy.upstream import Request, Upstream

# Set anew.
_REPLACED = frozenset((b"host", b"x-request-id", b"content-length"))


async def pass_through(call: Call, upstream: Upstream, limit: int) -> None:
    """Raises SidecarError before the reply has begun, UpstreamFailure after it, ClientGone."""
    length = call.declared_length(limit)
    chunked = find(call.headers, b"transfer-encoding") is not None
    headers = end_to_end(call.headers, _REPLACED)
    headers.append((b"x-request-id", call.request_id))
    if chunked:
        headers.append((b"transfer-encoding", b"chunked"))
    elif length is not None:  # set anew: a Connection header that names it must not unframe the body
        headers.append((b"content-length", b"%d" % length))
    request = Request(call.method, call.target, headers, None)
    exchange = await call.waiting(upstream.send(request, fresh=True))
    try:
        await call.until_gone_reading(_reply(call, exchange), _pump(call, exchange, limit, chunked))
    finally:
        exchange.close()


async def _pump(call: Call, exchange: Exchange, limit: int, chunked: bool) -> None:
    """Sends the request body on as it comes, then waits for the client to leave."""
    size = 0
    while (message := await call.receive())["type"] != "http.disconnect":
        data = message.get("body", b"")
        size += len(data)
        if size > limit:
            raise too_large(limit)
        if data:
            await exchange.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        if chunked and not message.get("more_body", False):
            chunked = False
            await exchange.write(b"0\r\n\r\n")


async def _reply(call: Call, exchange: Exchange) -> None:
    await call.waiting(exchange.head())
    headers = end_to_end(exchange.headers)
    if exchange.status == 304:  # tells the length of a body that does not come, which uvicorn would wait for
        headers = without(headers, b"content-length")
    await call.start(exchange.status, headers)
    async for chunk in exchange.chunks():
        await call.write(chunk, more=True)
    await call.write(b"", more=False)
