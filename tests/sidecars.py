"""The sidecar inside the running loop, raw clients for it, and replies of vLLM that socket tests speak of."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn
from uvicorn.server import ServerState

from proxy.app import App, create_app
from proxy.http import Protocol
from proxy.settings import Settings

# The event loop that `serve` runs on; for the fixture `anyio_backend`.
UVLOOP = ("asyncio", {"use_uvloop": True})

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
NOT_COMPLIANT = (
    b'{"error":{"message":"Out of range float values are not JSON compliant",'
    b'"type":"BadRequestError","param":null,"code":400}}'
)
ASKED = {"model": "m", "prompt": [10, 11], "max_tokens": 3, "logprobs": 0}


@dataclass(frozen=True, slots=True)
class Running:
    """A sidecar: its URL, its app, a client for it."""

    url: str
    app: App
    client: httpx.AsyncClient
    state: ServerState

    async def settled(self) -> None:
        """Returns when no request is being served."""
        await asyncio.gather(*self.state.tasks, return_exceptions=True)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.app.sidecar.metrics.registry.get_sample_value("logprob_sidecar_" + name, labels)


@asynccontextmanager
async def sidecar(upstream: str, **settings: Any) -> AsyncIterator[Running]:
    app = create_app(Settings(upstream=upstream, **settings))
    state = ServerState()
    async with serving(app, state) as url:
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, verify=False) as client:
            yield Running(url, app, client, state)
    app.sidecar.upstream.close()


@asynccontextmanager
async def serving(app: Any, state: ServerState) -> AsyncIterator[str]:
    """uvicorn's protocol without uvicorn's server, whose ticks of 0.1 s would be most of these tests' time."""
    config = uvicorn.Config(app, log_config=None, access_log=False, http=Protocol, ws="none")
    config.load()
    protocol: Any = config.http_protocol_class
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(
        lambda: protocol(config=config, server_state=state, app_state={}),
        "127.0.0.1",
        0,
    )
    try:
        host, port = listener.sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        listener.close()
        for connection in list(state.connections):
            connection.transport.abort()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def say(url: str, data: bytes) -> bytes:
    """Everything the server answers to `data` until it closes; ask for `connection: close` in it."""
    async with connected(url) as (reader, writer):
        writer.write(data)
        return await reader.read()


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    """A whole raw POST."""
    lines = [f"POST {path} HTTP/1.1".encode(), b"host: sidecar", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


def completion(*values: str, text: str = "abc") -> bytes:
    """A reply of vLLM's Python server: one choice with these JSON tokens as its logprobs."""
    choice = (
        f'{{"index":0,"text":{json.dumps(text)},{_logprobs(values)},"finish_reason":"length","stop_reason":null,'
        f'"token_ids":{_list(range(len(values)))}}}'
    )
    return f'{{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{choice}]}}'.encode()


def event(*values: str, finish: str = "null", index: int = 0, text: str = "x") -> bytes:
    """One event of a completions stream as vLLM's Python server writes it."""
    choice = (
        f'{{"index":{index},"text":{json.dumps(text, ensure_ascii=False)},{_logprobs(values)},"finish_reason":{finish},'
        f'"stop_reason":null,"token_ids":{_list([7] * len(values))}}}'
    )
    chunk = f'{{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{choice}]}}'
    return f"data: {chunk}\n\n".encode()


def _logprobs(values: Sequence[str]) -> str:
    names = [f"t{at}" for at in range(len(values))]
    top = ",".join(f'{{"{name}":{value}}}' for name, value in zip(names, values, strict=True))
    return (
        f'"logprobs":{{"text_offset":{_list(range(len(values)))},"token_logprobs":[{",".join(values)}],'
        f'"tokens":{_list(names)},"top_logprobs":[{top}]}}'
    )


def _list(values: Iterable[object]) -> str:
    return json.dumps(list(values), separators=(",", ":"))


DONE = b"data: [DONE]\n\n"
