"""What people write first: a proxy over a general HTTP client. ``python -m benchmarks.naive CLIENT UPSTREAM PORT``.

``fastapi-httpx``: a FastAPI route, httpx, json in and out. The others are raw ASGI with the sidecar's own byte scan and
differ in the client alone: ``httpx``, ``aiohttp``.
"""

import math
import sys
from typing import Any

import aiohttp
import httpx
import uvicorn
from fastapi import FastAPI, Request

from proxy.api import Api
from proxy.scan import clean

_HEADERS = {"content-type": "application/json"}


def fastapi_httpx(upstream: str) -> Any:
    app = FastAPI()
    client = httpx.AsyncClient(base_url=upstream, timeout=None, limits=httpx.Limits(max_connections=None))

    @app.post("/{path:path}")
    async def complete(path: str, request: Request) -> Any:
        reply = (await client.post("/" + path, json=await request.json())).json()
        for choice in reply["choices"]:
            values = choice["logprobs"]["token_logprobs"]
            choice["logprobs"]["token_logprobs"] = [
                value if value is not None and math.isfinite(value) else None for value in values
            ]
        return reply

    return app


def over_httpx(upstream: str) -> Any:
    client = httpx.AsyncClient(base_url=upstream, timeout=None, limits=httpx.Limits(max_connections=None))

    async def fetch(path: str, body: bytes) -> bytes:
        return (await client.post(path, content=body, headers=_HEADERS)).content

    return _raw(fetch)


def over_aiohttp(upstream: str) -> Any:
    session: list[aiohttp.ClientSession] = []

    async def fetch(path: str, body: bytes) -> bytes:
        if not session:
            session.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        async with session[0].post(upstream + path, data=body, headers=_HEADERS) as response:
            return await response.read()

    return _raw(fetch)


def _raw(fetch: Any) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        chunks, more = [], True
        while more:
            message = await receive()
            chunks.append(message.get("body", b""))
            more = message.get("more_body", False)
        reply = await fetch(scope["path"], b"".join(chunks))
        clean(reply, Api.COMPLETIONS)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(reply))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    return app


CLIENTS = {"fastapi-httpx": fastapi_httpx, "asgi-httpx": over_httpx, "asgi-aiohttp": over_aiohttp}

if __name__ == "__main__":
    _, client, url, port = sys.argv
    config = uvicorn.Config(
        CLIENTS[client](url),
        port=int(port),
        log_level="error",
        access_log=False,
        loop="uvloop",
        http="httptools",
        lifespan="off",
    )
    uvicorn.Server(config).run()
