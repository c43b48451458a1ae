"""``create_app(settings)``: the ASGI app. Decides which of three ways a request goes. Shell.

Own routes are a small FastAPI app; generation routes and everything else are raw ASGI, so that unknown fields, repeated
headers and encoded paths survive, and nothing is parsed that need not be.
"""

import asyncio
import secrets
import time
from urllib.parse import unquote, unquote_to_bytes

from proxy import own_routes
from proxy.api import Api
from proxy.asgi import Call, ClientGone, Receive, Scope, Send
from proxy.attempts import cause_of
from proxy.breaker import Admission, Breaker, BreakerSettings
from proxy.errors import BadReply, Cut, ErrorType, SidecarError, TimedOut, UpstreamFailure
from proxy.generation import Generation, StreamBroken
from proxy.headers import find
from proxy.incidents import Incidents
from proxy.metrics import OTHER
from proxy.passthrough import pass_through
from proxy.recovery import Policy
from proxy.settings import Settings
from proxy.sidecar import Sidecar
from proxy.unscorable import Encoding, Rules
from proxy.upstream import Upstream

_APIS = {api.value: api for api in Api}
_ENCODINGS = {encoding.value: encoding for encoding in Encoding}
_PREFIX = b"/nan/"
_CLIENT_GONE = 499  # nginx's code for a client that left before its reply began


class App:
    """ASGI. ``sidecar`` is its state."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.sidecar = sidecar
        self._own = own_routes.create(sidecar)
        sidecar.metrics.watch(lambda: sidecar.inflight, lambda: sidecar.breaker.state)
        settings = sidecar.settings
        self._rules = {encoding: Rules(encoding, settings.allow_positive) for encoding in Encoding}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._own(scope, receive, send)
            return
        target: bytes = scope["raw_path"]
        path: str = scope["path"]
        prefix = None
        if target.startswith(_PREFIX):
            name, _, rest = target[len(_PREFIX) :].partition(b"/")
            prefix, target = unquote_to_bytes(name).decode("latin-1"), b"/" + rest
            path = unquote(target.decode("ascii"))
        if path in own_routes.PATHS and (prefix is None or prefix in _ENCODINGS):
            await self._own({**scope, "path": path, "raw_path": target}, receive, send)
            return
        api = _APIS.get(path) if scope["method"] == "POST" else None
        call = _call(scope, receive, send, api.value if api else OTHER, target)
        await self._serve(call, api, prefix)

    async def _serve(self, call: Call, api: Api | None, prefix: str | None) -> None:
        metrics = self.sidecar.metrics
        self.sidecar.inflight += 1
        try:
            if prefix is not None and prefix not in _ENCODINGS:
                raise _unknown("the URL prefix /nan/…", prefix)
            call.refuse_upgrade()
            if api is None:
                await pass_through(call, self.sidecar.upstream, self.sidecar.settings.max_request_bytes)
            else:
                await self._generate(call, api, prefix)
        except ClientGone:
            metrics.client_disconnects.inc()
        except SidecarError as error:
            if not call.status:
                await call.answer_error(error)
        except UpstreamFailure as failure:
            metrics.upstream_error(cause_of(failure).name.lower())
            if not call.status:
                await call.answer_error(_answer(failure))
        except asyncio.CancelledError:
            if not call.status:
                message = "the sidecar is shutting down and drain_timeout is over"
                await call.answer_error(SidecarError(503, ErrorType.OVERLOADED, message, 1))
            raise
        except StreamBroken:
            pass  # returning before the last byte makes the server cut the connection
        finally:
            self.sidecar.inflight -= 1
            seconds = time.perf_counter() - call.started
            metrics.request(call.route, call.status or _CLIENT_GONE, seconds, max(0.0, seconds - call.waited))

    async def _generate(self, call: Call, api: Api, prefix: str | None) -> None:
        sidecar = self.sidecar
        rules = self._rules[_encoding(call, prefix, sidecar.settings.nan_encoding)]
        most = sidecar.settings.max_inflight
        if most and sidecar.generations >= most:
            raise SidecarError(503, ErrorType.OVERLOADED, f"{most} generations are in flight (max_inflight)", 1)
        now = time.monotonic()
        admission = sidecar.breaker.admit(now)
        if admission is Admission.REFUSED:
            bad, of = sidecar.breaker.counts()
            message = (
                f"{bad} of the last {of} replies held nan or floor logprobs: the engine computes garbage. Check its "
                "weights and restart it; a clean probe ends this state (/sidecar/incidents shows the replies)"
            )
            raise SidecarError(503, ErrorType.UNHEALTHY, message, sidecar.breaker.retry_after(now))
        sidecar.generations += 1
        try:
            await Generation(sidecar, call, api, rules, admission).run()
        finally:
            sidecar.generations -= 1


def create_app(settings: Settings) -> App:
    """The sidecar in front of ``settings.upstream``; importing and creating it opens nothing."""
    upstream = Upstream(
        settings.upstream, connect_timeout=settings.connect_timeout, read_timeout=settings.read_timeout or None
    )
    breaker = Breaker(
        BreakerSettings(
            settings.trip_ratio, settings.trip_min_responses, settings.trip_window, settings.trip_probe_interval
        )
    )
    policy = Policy(settings.retries, settings.connect_retries)
    return App(Sidecar(settings, upstream, breaker, Incidents(settings.incidents), policy))


def _call(scope: Scope, receive: Receive, send: Send, route: str, target: bytes) -> Call:
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    headers = list(scope["headers"])
    request_id = find(headers, b"x-request-id") or secrets.token_hex(16).encode()
    return Call(route, scope["method"].encode(), target, headers, request_id, receive, send)


def _encoding(call: Call, prefix: str | None, default: Encoding) -> Encoding:
    """Header over URL prefix over setting."""
    header = find(call.headers, b"x-nan-encoding")
    if header is None:
        return default if prefix is None else _ENCODINGS[prefix]
    name = header.decode("latin-1").strip()
    if name not in _ENCODINGS:
        raise _unknown("X-Nan-Encoding", name)
    return _ENCODINGS[name]


def _unknown(where: str, name: str) -> SidecarError:
    message = f"{where} names no NaN encoding: {name!r}; known are {', '.join(_ENCODINGS)}"
    return SidecarError(400, ErrorType.INVALID_REQUEST, message)


def _answer(failure: UpstreamFailure) -> SidecarError:
    """For a call that is sent exactly once."""
    match failure:
        case TimedOut():
            return SidecarError(504, ErrorType.TIMEOUT, str(failure))
        case Cut() | BadReply():
            return SidecarError(502, ErrorType.PROTOCOL, str(failure))
        case _:
            return SidecarError(502, ErrorType.UNREACHABLE, str(failure))
