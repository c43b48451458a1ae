"""The sidecar's own routes: health, metrics, status. Shell; a small FastAPI app."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from proxy import quick
from proxy.breaker import State
from proxy.errors import ErrorType, SidecarError, TimedOut, UpstreamFailure
from proxy.headers import find
from proxy.sidecar import Sidecar
from proxy.upstream import Request

PATHS = frozenset(
    (
        "/health",
        "/livez",
        "/readyz",
        "/metrics",
        "/sidecar",
        "/sidecar/",
        "/sidecar/status",
        "/sidecar/incidents",
        "/sidecar/upstream-metrics",
    )
)
_PAGE = Path(__file__).parent / "static" / "status.html"


@dataclass(frozen=True, slots=True)
class Health:
    """``state``: ok, unhealthy (it answered otherwise), busy (connected, no answer in time), unreachable."""

    state: str
    detail: str = ""


def create(sidecar: Sidecar) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        sidecar.upstream.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> JSONResponse:
        upstream = await _upstream_health(sidecar)
        breaker = sidecar.breaker.state
        healthy = upstream.state == "ok" and breaker is State.CLOSED
        body = {
            "status": "ok" if healthy else "unhealthy",
            "upstream": {"url": sidecar.upstream.url, "state": upstream.state, "detail": upstream.detail},
            "breaker": breaker.name.lower(),
        }
        return JSONResponse(body, 200 if healthy else 503)

    @app.get("/livez")
    async def livez() -> JSONResponse:
        return JSONResponse({"status": "alive"})

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        reachable = await sidecar.upstream.connects()
        ready = reachable and not sidecar.draining
        body = {"status": "ready" if ready else "not ready", "draining": sidecar.draining, "reachable": reachable}
        return JSONResponse(body, 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(sidecar.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/sidecar")
    async def without_slash() -> RedirectResponse:
        return RedirectResponse("/sidecar/")

    @app.get("/sidecar/")
    async def page() -> HTMLResponse:
        return HTMLResponse(await asyncio.to_thread(_PAGE.read_text, "utf-8"))

    @app.get("/sidecar/status")
    async def status() -> JSONResponse:
        return JSONResponse(_status(sidecar))

    @app.get("/sidecar/incidents")
    async def incidents() -> JSONResponse:
        return JSONResponse({"total": sidecar.incidents.total, "incidents": sidecar.incidents.newest()})

    @app.get("/sidecar/upstream-metrics")
    async def upstream_metrics() -> Response:
        try:
            code, kind, body = await _get(sidecar, b"/metrics")
        except (TimedOut, TimeoutError):
            return _error(
                SidecarError(504, ErrorType.TIMEOUT, f"{sidecar.upstream.url}/metrics gave no answer in time")
            )
        except UpstreamFailure as failure:
            return _error(SidecarError(502, ErrorType.UNREACHABLE, str(failure)))
        return Response(body, code, media_type=kind)

    @app.exception_handler(HTTPException)
    async def refuse(_: object, error: HTTPException) -> Response:
        refusal = SidecarError(error.status_code, ErrorType.INVALID_REQUEST, str(error.detail))
        return _error(refusal, error.headers)

    return app


def _error(error: SidecarError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error.body(), error.status, headers, media_type="application/json")


def _status(sidecar: Sidecar) -> dict[str, Any]:
    bad, of = sidecar.breaker.counts()
    return {
        "version": version("logprob-sidecar"),
        "compiled": quick.survey is not None,
        "uptime_seconds": round(time.time() - sidecar.started, 1),
        "draining": sidecar.draining,
        "breaker": {"state": sidecar.breaker.state.name.lower(), "unscorable_replies": bad, "replies": of},
        "settings": sidecar.settings.model_dump(mode="json"),
        "totals": sidecar.metrics.totals(),
        "incidents": sidecar.incidents.total,
    }


async def _upstream_health(sidecar: Sidecar) -> Health:
    try:
        code, _, body = await _get(sidecar, b"/health")
    except (TimedOut, TimeoutError):
        return Health("busy", f"connected, but no answer within {sidecar.settings.health_timeout:g} s")
    except UpstreamFailure as failure:
        return Health("unreachable", str(failure))
    return Health("ok") if code == 200 else Health("unhealthy", f"HTTP {code}: {body[:200].decode('utf-8', 'replace')}")


async def _get(sidecar: Sidecar, target: bytes) -> tuple[int, str, bytes]:
    """(status, content type, body) of the upstream; raises UpstreamFailure, TimeoutError."""
    async with asyncio.timeout(sidecar.settings.health_timeout):
        exchange = await sidecar.upstream.send(Request(b"GET", target, [], None), fresh=True)
        try:
            await exchange.head()
            kind = find(exchange.headers, b"content-type") or b"text/plain"
            return exchange.status, kind.decode("latin-1"), bytes(await exchange.read())
        finally:
            exchange.close()
