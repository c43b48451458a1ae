"""One generation reply of the stand-in on the wire: whole or streamed, aborted at once when its client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

import orjson
from starlette.types import Message, Receive, Scope, Send

from proxy.simulator.config import FrontEnd
from proxy.simulator.control import Engine
from proxy.simulator.engine import Choice
from proxy.simulator.refusals import Refusal
from proxy.simulator.requests import Ask, Route
from proxy.simulator.shapes import Json, Shapes

NON_COMPLIANT = "Out of range float values are not JSON compliant"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DEAD_RUST = "engine-core error: engine core reported fatal failure"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class Cut(Exception):
    """The connection breaks here, as the request ordered."""


class GenerationReply:
    """An ASGI app for one reply. Returning before the body is complete makes the server drop the connection."""

    def __init__(self, engine: Engine, ask: Ask, shapes: Shapes, choices: Sequence[Choice]) -> None:
        self._engine, self._ask, self._shapes, self._choices = engine, ask, shapes, choices
        self._front_end = engine.config.front_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task((self._stream if self._ask.stream else self._whole)(send))
        departure = asyncio.create_task(_departed(receive))
        try:
            await asyncio.wait({answer, departure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            unfinished = [task for task in (answer, departure) if not task.done()]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        if not answer.cancelled():
            answer.result()

    async def _whole(self, send: Send) -> None:
        status, cut = 200, False
        try:
            async for _ in self._steps():
                pass
            # Python 3.12 adds the value to the message of json's own error, so it is not passed on.
            raw = json.dumps(
                self._shapes.whole(self._choices), ensure_ascii=False, allow_nan=False, separators=(",", ":")
            )
        except ValueError:
            status = self._engine.config.nan_status
            refusal = Refusal(NON_COMPLIANT, status=status)
            raw = orjson.dumps(refusal.body(self._front_end)).decode()
        except Refusal as refusal:
            status = refusal.status
            raw = orjson.dumps(refusal.body(self._front_end)).decode()
        except Cut:
            cut = True
            raw = json.dumps(self._shapes.whole(self._choices))
        body = raw.encode("utf-8", "surrogatepass")
        await send(_start(status, "application/json", (b"content-length", str(len(body)).encode())))
        await send(_body(body[: len(body) // 2] if cut else body, more=cut))

    async def _stream(self, send: Send) -> None:
        rust = self._front_end is FrontEnd.RUST
        kind = "text/event-stream" if rust else "text/event-stream; charset=utf-8"
        await send(_start(200, kind, *(((b"cache-control", b"no-cache"),) if rust else ())))
        try:
            async with aclosing(self._events()) as stream:
                while (events := await self._next(stream, send)) is not None:
                    for event in events:
                        await send(_body(self._frame(event), more=True))
        except Refusal as refusal:
            if self._ask.route is Route.RESPONSES:
                return
            error = json.dumps(refusal.body(self._front_end), separators=(",", ":") if rust else None)
            await send(_body(f"data: {error}\n\n".encode(), more=True))
        except Cut:
            return
        if self._ask.route is not Route.RESPONSES:
            await send(_body(DONE, more=True))
        await send(_body(b"", more=False))

    async def _next(self, stream: AsyncGenerator[Iterable[Json], None], send: Send) -> Iterable[Json] | None:
        """The next events, or None at the end; comments while they keep the client waiting."""
        interval = self._engine.config.keep_alive_interval
        if not interval:
            return await anext(stream, None)
        waited = asyncio.ensure_future(anext(stream, None))
        try:
            while not (await asyncio.wait({waited}, timeout=interval))[0]:
                await send(_body(KEEP_ALIVE, more=True))
            return waited.result()
        finally:
            waited.cancel()

    async def _events(self) -> AsyncGenerator[Iterable[Json], None]:
        sent_steps = [0] * len(self._choices)
        sent_text = [0] * len(self._choices)
        opened = False
        async for advanced in self._steps():
            if not opened:
                opened = True
                yield self._shapes.opening(self._choices)
            for choice in advanced:
                first = sent_steps[choice.index] == 0
                fresh = choice.steps[sent_steps[choice.index] :]
                if choice.finish_reason is None and len(fresh) < (1 if first else self._ask.stream_interval):
                    continue
                text = choice.visible()
                yield self._shapes.chunk(choice, fresh, text[sent_text[choice.index] :], first)
                sent_steps[choice.index], sent_text[choice.index] = len(choice.steps), len(text)
        yield self._shapes.closing(self._choices)

    async def _steps(self) -> AsyncGenerator[Sequence[Choice], None]:
        async with aclosing(self._engine.steps(self._choices)) as steps:
            async for advanced in steps:
                made = len(self._choices[0].steps)
                if self._ask.cut_at is not None and made > self._ask.cut_at:
                    raise Cut
                if self._ask.die_at is not None and made > self._ask.die_at:
                    rust = self._front_end is FrontEnd.RUST
                    raise Refusal(DEAD_RUST if rust else DEAD, status=500, code="server_error")
                yield advanced

    def _frame(self, event: Json) -> bytes:
        """orjson writes NaN as null, as pydantic does for vLLM's streams."""
        data = b"data: " + orjson.dumps(event) + b"\n\n"
        return f"event: {event['type']}\n".encode() + data if self._ask.route is Route.RESPONSES else data


async def _departed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, content_type: str, *headers: tuple[bytes, bytes]) -> Message:
    listed = [(b"content-type", content_type.encode()), *headers]
    return {"type": "http.response.start", "status": status, "headers": listed}


def _body(body: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
