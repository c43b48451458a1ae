"""The embedded stand-in for vLLM 0.32: its routes, its two front ends, and its failures, without a model or a GPU.

An app holds all of its state; nothing here is global. Shapes, tokens and requests live in the sibling modules.
"""

import random
import signal
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route as Path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.simulator.config import FrontEnd, SimulatorConfig
from proxy.simulator.control import Engine
from proxy.simulator.engine import Choice
from proxy.simulator.refusals import Refusal, parse
from proxy.simulator.reply import GenerationReply
from proxy.simulator.requests import Ask, Route, read_ask
from proxy.simulator.responses import ResponsesShapes
from proxy.simulator.rust import RustShapes
from proxy.simulator.shapes import PythonShapes, Shapes
from proxy.simulator.vocabulary import decode, encode

Endpoint = Callable[[Request], Awaitable[Any]]
VERSION = "0.32.0"
RECENT = 1000
KEPT_BODY = 65536
ID_PREFIX = {Route.COMPLETIONS: "cmpl-", Route.RESPONSES: "resp_", Route.GENERATE: "generate-tokens-"}
PLAIN_CALLS = {
    "/init_weight_transfer_engine": {"message": "Weight transfer initialized"},
    "/shutdown_weight_transfer_engine": {"message": "Weight transfer shut down"},
    "/start_weight_update": {"message": "Weight update started"},
    "/update_weights": {"message": "Weights updated"},
    "/finish_weight_update": {"message": "Weight update finished"},
    "/sleep": {},
    "/wake_up": {},
}


def create_simulator(config: SimulatorConfig | None = None) -> ASGIApp:
    """A fresh stand-in as an ASGI app; `app.state.engine` is its engine, for tests that count."""
    config = config or SimulatorConfig()
    server = _Server(config)
    routes = [
        Path("/v1/completions", server.generation(Route.COMPLETIONS), methods=["POST"]),
        Path("/v1/chat/completions", server.generation(Route.CHAT), methods=["POST"]),
        Path("/inference/v1/generate", server.generation(Route.GENERATE), methods=["POST"]),
        Path("/health", server.health),
        Path("/v1/models", server.models),
        Path("/version", server.version),
        Path("/metrics", server.metrics),
        Path("/tokenize", server.tokenize, methods=["POST"]),
        Path("/detokenize", server.detokenize, methods=["POST"]),
        Path("/pause", server.pause, methods=["POST"]),
        Path("/resume", server.resume, methods=["POST"]),
        Path("/is_paused", server.is_paused),
        Path("/abort_requests", server.abort_requests, methods=["POST"]),
        Path("/reset_prefix_cache", server.reset_prefix_cache, methods=["POST"]),
        Path("/get_world_size", server.world_size),
        Path("/server_info", server.info),
        Path("/simulator/calls", server.calls),
        *(Path(path, _plain(reply), methods=["POST"]) for path, reply in PLAIN_CALLS.items()),
    ]
    if config.front_end is FrontEnd.PYTHON:
        routes += [
            Path("/v1/chat/completions/batch", server.generation(Route.BATCH), methods=["POST"]),
            Path("/v1/responses", server.generation(Route.RESPONSES), methods=["POST"]),
            Path("/invocations", server.generation(None), methods=["POST"]),
        ]
    handlers = {HTTPException: server.http_error, Refusal: server.refused}
    recorder = Middleware(_Recorder, calls=server.recorded, recent=server.recent)
    app = Starlette(routes=routes, middleware=[recorder], exception_handlers=handlers)  # type: ignore[arg-type]
    app.state.engine = server.engine
    return app


def serve(config: SimulatorConfig, host: str = "127.0.0.1", port: int = 8000) -> int:
    """Runs a stand-in until it is told to stop, prints one line with the URL when it listens, returns the exit code."""
    app = create_simulator(config)
    options = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=1, ws="none")
    server = _AnnouncedServer(options)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn stops at it all the same, then raises it once more
    with suppress(KeyboardInterrupt, SystemExit):  # it does so with SIGINT too, and exits where it cannot bind
        server.run()
    return 0 if server.started else 1


class _AnnouncedServer(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(f"simulated vLLM {VERSION} on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)


class _Server:
    """The routes over one engine."""

    def __init__(self, config: SimulatorConfig) -> None:
        self.config, self.engine = config, Engine(config)
        self.recorded: Counter[str] = Counter()
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._random = random.Random(config.seed)
        self._started = int(time.time())

    def generation(self, fixed: Route | None) -> Endpoint:
        async def endpoint(request: Request) -> GenerationReply:
            body = parse(await request.body(), self.config.front_end)
            route = fixed or (Route.CHAT if "messages" in body else Route.COMPLETIONS)
            media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
            if self.config.front_end is FrontEnd.PYTHON and media_type != "application/json":
                text = "Unsupported Media Type: Only 'application/json' is allowed"
                raise Refusal(f"1 validation error:\n  {text}", kind="Bad Request")
            ask = read_ask(self.config, route, body, self._random.getrandbits(63))
            return GenerationReply(self.engine, ask, self._shapes(ask, request), self._choices(ask))

        return endpoint

    def _shapes(self, ask: Ask, request: Request) -> Shapes:
        rust = self.config.front_end is FrontEnd.RUST
        given = request.headers.get("x-request-id") if ask.route is not Route.RESPONSES else None
        request_id = given or f"{self._random.getrandbits(32 if rust else 64):0{8 if rust else 16}x}"
        if not (rust and ask.route is Route.GENERATE):
            request_id = ID_PREFIX.get(ask.route, "chatcmpl-") + request_id
        kind = RustShapes if rust else ResponsesShapes if ask.route is Route.RESPONSES else PythonShapes
        return kind(ask, request_id, int(time.time()))

    def _choices(self, ask: Ask) -> list[Choice]:
        contaminated = self.engine.contaminated(ask.prompts[0].ids, ask.cache_salt)
        return [
            Choice(self.config, ask.sampling, prompt, which * ask.n + sample, sample, contaminated)
            for which, prompt in enumerate(ask.prompts)
            for sample in range(ask.n)
        ]

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def models(self, request: Request) -> Response:
        rust = self.config.front_end is FrontEnd.RUST
        card = {"id": self.config.model, "object": "model", "created": self._started}
        card |= {"owned_by": "vllm-frontend-rs" if rust else "vllm", "root": self.config.model, "parent": None}
        card |= {"max_model_len": self.config.max_model_len} | ({} if rust else {"permission": []})
        return JSONResponse({"object": "list", "data": [card]})

    async def version(self, request: Request) -> Response:
        rust = {"rust_frontend_version": VERSION} if self.config.front_end is FrontEnd.RUST else {}
        return JSONResponse({"version": VERSION} | rust)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.engine.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, request: Request) -> Response:
        body = parse(await request.body(), self.config.front_end)
        ids = encode(str(body.get("prompt", "")))
        length = self.config.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        body = parse(await request.body(), self.config.front_end)
        return JSONResponse({"prompt": decode(body.get("tokens", []), skip_special=False)})

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise Refusal("Input should be 'abort', 'wait' or 'keep'", param="query.mode", kind="Bad Request")
        await self.engine.pause(mode)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.engine.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self.engine.paused})

    async def abort_requests(self, request: Request) -> Response:
        return JSONResponse({"status": "aborted", "aborted": self.engine.abort_all()})

    async def reset_prefix_cache(self, request: Request) -> Response:
        self.engine.reset_prefix_cache()
        return JSONResponse({"success": True})

    async def world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": 1})

    async def info(self, request: Request) -> Response:
        return JSONResponse({"vllm_config": f"model='{self.config.model}'", "vllm_env": {}, "system_env": {}})

    async def calls(self, request: Request) -> Response:
        return JSONResponse({"counts": self.recorded, "recent": list(self.recent)})

    async def http_error(self, request: Request, error: HTTPException) -> Response:
        if self.config.front_end is FrontEnd.RUST:
            return Response(status_code=error.status_code)
        refusal = Refusal(str(error.detail), status=error.status_code, kind=str(error.detail))
        return await self.refused(request, refusal)

    async def refused(self, request: Request, refusal: Refusal) -> Response:
        return JSONResponse(refusal.body(self.config.front_end), refusal.status)


def _plain(reply: dict[str, str]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        await request.body()
        return JSONResponse(reply)

    return endpoint


class _Recorder:
    """Counts every call and keeps the last ones with their headers and bodies, for `/simulator/calls`."""

    def __init__(self, app: ASGIApp, calls: Counter[str], recent: deque[dict[str, Any]]) -> None:
        self._app, self._calls, self._recent = app, calls, recent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/simulator/"):
            return await self._app(scope, receive, send)
        self._calls[f"{scope['method']} {scope['path']}"] += 1
        headers = [[k.decode("latin-1"), v.decode("latin-1")] for k, v in scope["headers"]]
        call = {"method": scope["method"], "path": scope["path"], "query": scope["query_string"].decode("latin-1")}
        call |= {"headers": headers, "body": ""}
        self._recent.append(call)

        async def recording_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request" and len(call["body"]) < KEPT_BODY:
                call["body"] += message.get("body", b"").decode("utf-8", "replace")[:KEPT_BODY]
            return message

        await self._app(scope, recording_receive, send)
