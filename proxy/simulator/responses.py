"""JSON and events of the Python server's /v1/responses: the same logprobs repeated in four kinds of event."""

from collections.abc import Iterator, Sequence
from typing import Any

from proxy.simulator.engine import Choice, Step
from proxy.simulator.requests import Ask
from proxy.simulator.shapes import FLOOR, Json, clamp
from proxy.simulator.vocabulary import token_text


class ResponsesShapes:
    def __init__(self, ask: Ask, request_id: str, created: int) -> None:
        self._ask, self._id, self._created = ask, request_id, created
        self._message_id = "msg_" + request_id.removeprefix("resp_")
        self._sequence = 0
        self._open = False  # the message item appears with the first visible text
        self._kept: list[Step] = []  # tokens without visible text never reach the stream, nor do their logprobs

    def whole(self, choices: Sequence[Choice]) -> Json:
        choice = choices[0]
        return self._response(choice, [self._item(choice.text, choice.steps, "completed")])

    def opening(self, choices: Sequence[Choice]) -> Iterator[Json]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, {"response": self._response(None, [])})

    def chunk(self, choice: Choice, steps: Sequence[Step], delta: str, first: bool) -> Iterator[Json]:
        if not delta:
            return
        if not self._open:
            self._open = True
            item = self._item("", [], "in_progress")
            yield self._event("response.output_item.added", {"item": item, "output_index": 0})
            part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
            yield self._event("response.content_part.added", self._place() | {"output_index": 0, "part": part})
        self._kept += steps
        logprobs = [self._entry(step, with_bytes=False) for step in steps] if self._ask.logprobs is not None else []
        body = {"content_index": 0, "delta": delta, "item_id": self._message_id, "logprobs": logprobs}
        yield self._event("response.output_text.delta", body | {"output_index": 0})

    def closing(self, choices: Sequence[Choice]) -> Iterator[Json]:
        choice = choices[0]
        output = []
        if self._open:
            done = self._place() | {"logprobs": [], "output_index": 0}
            item = self._item(choice.text, self._kept, "completed")
            output = [item]
            yield self._event("response.output_text.done", done, {"text": choice.text})
            part = {"output_index": 0, "part": item["content"][0]}
            yield self._event("response.content_part.done", self._place() | part)
            yield self._event("response.output_item.done", {"item": item, "output_index": 0})
        yield self._event("response.completed", {"response": self._response(choice, output)})

    def _place(self) -> Json:
        return {"content_index": 0, "item_id": self._message_id}

    def _event(self, name: str, body: Json, tail: Json | None = None) -> Json:
        numbered = body | {"sequence_number": self._sequence} | (tail or {}) | {"type": name}
        self._sequence += 1
        return numbered

    def _item(self, text: str, steps: Sequence[Step], status: str) -> Json:
        content: list[Json] = []
        if text:
            asked = self._ask.logprobs is not None
            logprobs: Any = [self._entry(step, with_bytes=True) for step in steps] if asked else None
            content = [{"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}]
        item: Json = {"id": self._message_id, "content": content, "role": "assistant", "status": status}
        return item | {"type": "message", "phase": None}

    def _entry(self, step: Step, with_bytes: bool) -> Json:
        listed = [
            self._scored(token_text(c.token_id), clamp(c.logprob), with_bytes)
            for c in step.candidates[: self._ask.logprobs or 0]
        ]
        own = clamp(step.candidates[0].logprob) if step.candidates else FLOOR
        return self._scored(step.token, own, with_bytes) | {"top_logprobs": listed}

    def _scored(self, token: str, logprob: float, with_bytes: bool) -> Json:
        spelled: Json = {"bytes": list(token.encode())} if with_bytes else {}
        return {"token": token} | spelled | {"logprob": logprob}

    def _response(self, choice: Choice | None, output: list[Json]) -> Json:
        """The whole response object; without a choice it is still in progress."""
        fields, sampling = self._ask.fields or {}, self._ask.sampling
        cut = choice is not None and choice.finish_reason == "length"
        reply: Json = {"id": self._id, "created_at": self._created}
        reply |= {"incomplete_details": {"reason": "max_output_tokens"} if cut else None}
        reply |= {"instructions": fields.get("instructions"), "metadata": fields.get("metadata")}
        reply |= {"model": self._ask.model, "object": "response", "output": output, "parallel_tool_calls": True}
        reply |= {"temperature": sampling.temperature, "tool_choice": "none", "tools": []}
        reply |= {"top_p": float(fields.get("top_p") or 1.0), "background": False}
        reply |= {"max_output_tokens": sampling.max_tokens, "max_tool_calls": None, "previous_response_id": None}
        status = "in_progress" if choice is None else "incomplete" if cut else "completed"
        reply |= {"prompt": None, "reasoning": None, "service_tier": "auto", "status": status, "text": None}
        reply |= {"top_logprobs": self._ask.logprobs or 0, "truncation": "disabled"}
        reply |= {"usage": None if choice is None else _usage(choice), "user": fields.get("user")}
        reply |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        return reply | dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages"))


def _usage(choice: Choice) -> Json:
    prompt_tokens, output_tokens = len(choice.prompt.ids), len(choice.steps)
    cached: Json = {"cached_tokens": 0, "cache_write_tokens": 0}
    cached |= {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
    produced: Json = {"reasoning_tokens": 0, "tool_output_tokens": 0}
    produced |= {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": cached,
        "output_tokens": output_tokens,
        "output_tokens_details": produced,
        "total_tokens": prompt_tokens + output_tokens,
    }
