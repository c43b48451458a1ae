"""A generation request from client to vLLM and back: the one loop over ``proxy.recovery.decide``. Shell.

Attempt -> cause -> decide -> match. Nothing else retries, and after a byte of the reply has gone out nothing does.
"""

import asyncio
import time
from dataclasses import replace
from functools import cached_property

from proxy import recovery
from proxy.api import Api, Asked, read_request
from proxy.asgi import Call
from proxy.assemble import AssemblyError, stream_request
from proxy.attempts import Attempt, Reply, cause_of, is_stream, read_reply, with_fresh_salt
from proxy.breaker import Admission
from proxy.errors import BadReply, Cut, ErrorType, SidecarError, TimedOut, UpstreamFailure
from proxy.exchange import Exchange
from proxy.headers import end_to_end
from proxy.incidents import Incident, describe
from proxy.jsonbody import dumps
from proxy.recovery import Accept, Attempts, Cause, GiveUp, Repeat, Stream
from proxy.rewrite import StreamRewriter, rewrite_reply
from proxy.sidecar import Sidecar
from proxy.unscorable import Findings, Reason, Rules

# The sidecar writes its own.
_OF_THIS_REPLY = frozenset((b"content-length", b"x-request-id"))


class StreamBroken(Exception):
    """An event stream ended in an error event; the connection must not end cleanly."""


class Generation:
    """One request; created per request."""

    def __init__(self, sidecar: Sidecar, call: Call, api: Api, rules: Rules, admission: Admission) -> None:
        self._sidecar = sidecar
        self._call = call
        self._api = api
        self._rules = rules
        self._admission = admission
        self._raw = b""
        self._judged_salts = 0  # repeats with a fresh salt whose outcome has been counted

    @cached_property
    def _asked(self) -> Asked:
        return read_request(self._api, self._raw)

    async def run(self) -> None:
        """Raises SidecarError before the reply has begun, UpstreamFailure after it, ClientGone."""
        self._raw = await self._call.body(self._sidecar.settings.max_request_bytes)
        await self._call.until_gone(self._serve())

    async def _serve(self) -> None:
        attempt = Attempt(self._call, self._sidecar.upstream)
        tried = Attempts()
        body = self._raw
        while True:
            cause, reply, why = await self._try(attempt, body)
            if reply is None and cause is Cause.OK:
                return  # a stream, delivered
            if tried.salted and tried.salted != self._judged_salts:
                self._judged_salts = tried.salted
                self._sidecar.metrics.recovery("retry", "recovered" if cause is Cause.OK else "failed")
            if cause is Cause.NOT_COMPLIANT:
                tried = replace(tried, streamable=self._streamable())
            match recovery.decide(self._sidecar.policy, tried, cause):
                case Accept():
                    assert reply is not None
                    await self._finish(reply, "retry" if tried.salted and cause is Cause.OK else "")
                    return
                case Repeat(fresh_salt, delay):
                    if fresh_salt:
                        tried = replace(tried, salted=tried.salted + 1)
                        body = dumps(with_fresh_salt(self._asked.body or {}))
                    else:
                        tried = replace(tried, reconnected=tried.reconnected + 1)
                    await self._call.waiting(asyncio.sleep(delay))
                case Stream():
                    await self._finish(await self._by_stream(attempt, why), "stream")
                    return
                case GiveUp(status, error_type):
                    raise self._give_up(status, error_type, why)

    async def _try(self, attempt: Attempt, body: bytes) -> tuple[Cause, Reply | None, str]:
        """(cause, whole reply, the reason in words); a stream is delivered here, and no reply comes back."""
        try:
            exchange = await self._call.waiting(attempt.send(body))
            try:
                if exchange.status == 200 and is_stream(exchange):
                    await self._stream(exchange)
                    return Cause.OK, None, ""
                reply = await self._call.waiting(read_reply(exchange))
            finally:
                exchange.close()
        except UpstreamFailure as failure:
            if self._call.status:
                raise
            cause, why = cause_of(failure), str(failure)
            self._sidecar.metrics.upstream_error(cause.name.lower())
            return cause, None, why
        if reply.status == 200:
            return Cause.OK, reply, ""
        cause = recovery.classify(reply.status, reply.content_type, reply.body, self._asked.logprobs)
        if cause is Cause.NOT_COMPLIANT and self._asked.body is None:
            cause = Cause.CLIENT_ERROR  # what cannot be read cannot be asked for in another way
        self._sidecar.metrics.upstream_error(cause.name.lower())
        return cause, reply, reply.body.decode("utf-8", "replace")

    def _streamable(self) -> bool:
        asked = self._asked
        if asked.stream:  # the client wants events, and the ladder's stream ends in a whole reply
            return False
        return asked.body is not None and stream_request(asked.api, asked.body) is not None

    async def _by_stream(self, attempt: Attempt, why: str) -> Reply:
        """The ladder's last step; what vLLM said first goes into the error."""
        asked = self._asked
        request = with_fresh_salt(asked.body or {})
        try:
            fetch = attempt.reassembled(asked.api, request, self._sidecar.settings.runaway_tokens)
            reply = await self._call.waiting(fetch)
        except (UpstreamFailure, AssemblyError) as failure:
            self._sidecar.metrics.recovery("stream", "failed")
            raise self._give_up(502, ErrorType.UNSCORABLE, f"{why}; and then: {failure}") from failure
        self._sidecar.metrics.recovery("stream", "recovered")
        if reply.runaway:
            self._sidecar.metrics.runaway_aborts.inc()
        return reply

    async def _finish(self, reply: Reply, recovered: str) -> None:
        headers = end_to_end(reply.headers, _OF_THIS_REPLY)
        headers.append((b"x-request-id", self._call.request_id))
        body = reply.body
        if reply.status == 200:
            try:
                body, findings = rewrite_reply(body, self._api, self._rules, lambda: self._asked)
            except BadReply as failure:
                self._sidecar.metrics.upstream_error(Cause.BAD_REPLY.name.lower())
                raise self._give_up(502, ErrorType.PROTOCOL, str(failure)) from failure
            self._account(findings, recovered, reply.runaway)
            if self._rejects(findings):
                raise self._rejection(findings)
            if findings.unscorable:
                headers.append((b"x-unscorable-tokens", b"%d" % findings.unscorable))
            if recovered:
                headers.append((b"x-sidecar-recovery", recovered.encode()))
        await self._call.answer(reply.status, headers, body)

    async def _stream(self, exchange: Exchange) -> None:
        """Event by event; a stream that breaks ends in an error event and a cut connection, never a clean end."""
        reject = self._sidecar.settings.on_unscorable == "reject"
        rewriter = StreamRewriter(self._asked, self._rules, reject=reject)
        headers = end_to_end(exchange.headers, _OF_THIS_REPLY)
        await self._call.start(200, [*headers, (b"x-request-id", self._call.request_id)])
        try:
            async for chunk in self._call.timed(exchange.chunks()):
                if out := rewriter.feed(chunk):
                    await self._call.write(out, more=True)
                if rewriter.broken is not None:
                    raise rewriter.broken
                if self._rejects(rewriter.findings):
                    raise self._rejection(rewriter.findings)
            if not rewriter.ended:
                raise Cut(f"{self._sidecar.upstream.url} ended its stream without the last event")
            await self._call.write(rewriter.close(), more=False)
        except (UpstreamFailure, SidecarError) as failure:
            error = failure if isinstance(failure, SidecarError) else self._give_up(*_broken(failure), str(failure))
            await self._call.write(b"data: " + error.body() + b"\n\n", more=True)
            if isinstance(failure, UpstreamFailure):
                self._sidecar.metrics.upstream_error(cause_of(failure).name.lower())
            raise StreamBroken from failure
        finally:
            self._account(rewriter.findings, "", False)

    def _rejects(self, findings: Findings) -> bool:
        bad = findings.unscorable or findings.unmarkable
        return bool(bad) and self._sidecar.settings.on_unscorable == "reject"

    def _rejection(self, findings: Findings) -> SidecarError:
        found = ", ".join(f"{count} {reason.value}" for reason, count in findings.by_reason().items())
        what = f"{findings.unscorable} of {findings.sampled} tokens are unscorable ({found})"
        if findings.unmarkable:
            what = f"{findings.unmarkable} choices have no logprobs although they were asked for"
        return SidecarError(502, ErrorType.UNSCORABLE, f"{what} and on_unscorable is reject")

    def _account(self, findings: Findings, recovered: str, runaway: bool) -> None:
        """Metrics, breaker and incident of one delivered reply."""
        sidecar, counts = self._sidecar, findings.by_reason()
        sidecar.metrics.found(self._api.value, findings)
        if findings.sampled:
            bad = bool(counts.get(Reason.NAN) or counts.get(Reason.FLOOR))
            sidecar.breaker.record(time.monotonic(), bad, self._admission)
        if not (findings.marked or findings.unmarkable or recovered):
            return
        action = "rejected" if self._rejects(findings) else "marked" if findings.unscorable else "passed"
        detail = f"recovered by {recovered}" if recovered else ""
        if runaway:
            detail += ", cut as a runaway"
        if findings.unmarkable:
            detail = "logprobs were asked for and are gone; without token ids nothing can be marked"
        self._incident(action, detail, findings)

    def _give_up(self, status: int, error_type: ErrorType, why: str) -> SidecarError:
        self._incident("failed", f"{error_type.value}: {why[:500]}", Findings())
        return SidecarError(status, error_type, why)

    def _incident(self, action: str, detail: str, findings: Findings) -> None:
        reasons, positions = describe(findings)
        request_id = self._call.request_id.decode("latin-1")
        self._sidecar.incidents.add(
            Incident(time.time(), self._api.value, request_id, action, detail, reasons, positions)
        )


def _broken(failure: UpstreamFailure) -> tuple[int, ErrorType]:
    """What an event stream that broke is told as."""
    return (504, ErrorType.TIMEOUT) if isinstance(failure, TimedOut) else (502, ErrorType.PROTOCOL)
