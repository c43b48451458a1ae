"""JSON of vLLM's Python server: completions, chat and generate, whole and streamed, key for key in its order.

NaN and -inf stay floats here: whoever serialises them decides whether that is an error (whole) or null (streamed).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from proxy.simulator.engine import Candidate, Choice, Prompt, Step, prompt_logprobs
from proxy.simulator.requests import Ask, Route
from proxy.simulator.vocabulary import token_text

Json = dict[str, Any]
FLOOR = -9999.0
FINGERPRINT = "vllm-0.32.0-3213d402"
OBJECTS = {Route.COMPLETIONS: "text_completion", Route.CHAT: "chat.completion", Route.BATCH: "chat.completion"}


class Shapes(Protocol):
    """One reply in the making; the same calls for every route and both servers."""

    def whole(self, choices: Sequence[Choice]) -> Json: ...
    def opening(self, choices: Sequence[Choice]) -> Iterator[Json]: ...
    def chunk(self, choice: Choice, steps: Sequence[Step], delta: str, first: bool) -> Iterator[Json]: ...
    def closing(self, choices: Sequence[Choice]) -> Iterator[Json]: ...


def clamp(logprob: float) -> float:
    """Python's `max(nan, -9999.0)` is NaN: the order of the arguments is why vLLM lets NaN through."""
    return max(logprob, FLOOR)


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


def total_usage(choices: Sequence[Choice]) -> Json:
    """Each prompt counts once, however many samples it has."""
    prompts = {choice.index - choice.sample: len(choice.prompt.ids) for choice in choices}
    return usage(sum(prompts.values()), sum(len(choice.steps) for choice in choices))


class PythonShapes:
    def __init__(self, ask: Ask, request_id: str, created: int) -> None:
        self._ask, self._id, self._created = ask, request_id, created
        self._offsets: dict[int, int] = {}

    def whole(self, choices: Sequence[Choice]) -> Json:
        counted = total_usage(choices) | {"prompt_tokens_details": None, "completion_tokens_details": None}
        if self._ask.route is Route.GENERATE:
            return self._whole_generate(choices, counted)
        make = self._completion if self._ask.route is Route.COMPLETIONS else self._message
        reply = self._head("") | {"choices": [make(choice) for choice in choices]}
        reply |= {"service_tier": None, "system_fingerprint": FINGERPRINT, "usage": counted}
        if self._ask.route is not Route.COMPLETIONS:
            reply |= {
                "prompt_logprobs": self._prompt_logprobs(choices[0]),
                "prompt_token_ids": self._prompt_ids(choices[0].prompt, self._ask.return_token_ids),
                "prompt_text": None,
            }
        return reply | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

    def opening(self, choices: Sequence[Choice]) -> Iterator[Json]:
        if self._ask.route is not Route.CHAT:
            return
        for choice in choices:
            delta = {"role": "assistant", "content": ""}
            part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = self._prompt_ids(choice.prompt, self._ask.return_token_ids)
            chunk = self._head(".chunk") | {"choices": [part], "prompt_token_ids": ids, "prompt_text": None}
            yield self._with_usage(chunk, choice, 0)

    def chunk(self, choice: Choice, steps: Sequence[Step], delta: str, first: bool) -> Iterator[Json]:
        ids = [step.token_id for step in steps] if self._ask.return_token_ids else None
        part: Json = {"index": choice.index}
        match self._ask.route:
            case Route.GENERATE:
                part = self._generated(choice, steps, choice.finish_reason, delta)
                yield self._generate_head() | {"choices": [part]}
                return
            case Route.COMPLETIONS:
                text, logprobs = self._completion_delta(choice, steps, delta, first)
                part |= {"text": text, "logprobs": logprobs}
                part |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
                returned = self._ask.return_token_ids or self._ask.echo
                part |= {"prompt_token_ids": self._prompt_ids(choice.prompt, first and returned), "token_ids": ids}
            case _:
                asked = self._ask.logprobs is not None
                part |= {"delta": {"content": delta}, "logprobs": self._chat(steps, streamed=True) if asked else None}
                part |= {"finish_reason": choice.finish_reason}
                if choice.finish_reason is not None:
                    part |= {"stop_reason": choice.stop_reason}
                part |= {"token_ids": ids}
        chunk = self._head(".chunk") | {"choices": [part]}
        if choice.finish_reason is not None and not self._ask.include_usage:
            chunk |= {"system_fingerprint": FINGERPRINT}
        yield self._with_usage(chunk, choice, len(choice.steps))

    def closing(self, choices: Sequence[Choice]) -> Iterator[Json]:
        if not self._ask.include_usage:
            return
        if self._ask.route is Route.GENERATE:
            yield self._generate_head() | {"usage": total_usage(choices), "choices": []}
        else:
            counted = total_usage(choices)
            yield self._head(".chunk") | {"choices": [], "usage": counted, "system_fingerprint": FINGERPRINT}

    def _head(self, suffix: str) -> Json:
        kind = OBJECTS[self._ask.route] + ("" if self._ask.route is Route.COMPLETIONS else suffix)
        return {"id": self._id, "object": kind, "created": self._created, "model": self._ask.model}

    def _with_usage(self, chunk: Json, choice: Choice, tokens: int) -> Json:
        if self._ask.continuous_usage and self._ask.include_usage:
            chunk |= {"usage": usage(len(choice.prompt.ids), tokens)}
        return chunk

    def _completion(self, choice: Choice) -> Json:
        ask = self._ask
        prompt_text = choice.prompt.text if ask.echo and not ask.return_token_ids else ""
        steps = [] if ask.prompt_only else choice.steps
        return {
            "index": choice.index,
            "text": prompt_text + ("" if ask.prompt_only else choice.text),
            "logprobs": self._columns(choice, steps, ask.echo, 0) if ask.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": [step.token_id for step in steps] if ask.return_token_ids else None,
            "prompt_logprobs": self._prompt_logprobs(choice),
            "prompt_token_ids": self._prompt_ids(choice.prompt, ask.return_token_ids),
            "routed_experts": None,
        }

    def _completion_delta(self, choice: Choice, steps: Sequence[Step], delta: str, first: bool) -> tuple[str, Any]:
        ask, echoed = self._ask, self._ask.echo and first
        prompt_text = choice.prompt.text if echoed and not ask.return_token_ids else ""
        if ask.prompt_only:
            steps, delta = [], ""
        logprobs = None
        if ask.logprobs is not None:
            logprobs = self._columns(choice, steps, echoed, self._offsets.get(choice.index, 0))
            if logprobs["tokens"]:
                self._offsets[choice.index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        return prompt_text + delta, logprobs

    def _columns(self, choice: Choice, steps: Sequence[Step], echoed: bool, offset: int) -> Json:
        rows: list[tuple[int, str, tuple[Candidate, ...]]] = []
        if echoed:
            candidates = [(), *prompt_logprobs(choice, self._ask.logprobs or 0)]
            rows += [(i, token_text(i), row) for i, row in zip(choice.prompt.ids, candidates, strict=True)]
        rows += [(step.token_id, step.token, step.candidates) for step in steps]
        columns: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, text, row in rows:
            token = self._name(token_id, text)
            columns["text_offset"].append(offset)
            columns["token_logprobs"].append(clamp(row[0].logprob) if row else None)
            columns["tokens"].append(token)
            top = {self._name(c.token_id, token_text(c.token_id)): clamp(c.logprob) for c in row}
            columns["top_logprobs"].append(top if row else None)
            offset += len(token)
        return columns

    def _message(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": None}
        message |= {"audio": None, "function_call": None, "reasoning": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._chat(choice.steps) if self._ask.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": [step.token_id for step in choice.steps] if self._ask.return_token_ids else None,
            "routed_experts": None,
        }

    def _chat(self, steps: Sequence[Step], streamed: bool = False, top: int | None = None) -> Json:
        return {
            "content": [self._chat_entry(step, streamed, self._ask.logprobs if top is None else top) for step in steps]
        }

    def _chat_entry(self, step: Step, streamed: bool, top: int | None) -> Json:
        token, spelled = self._name(step.token_id, step.token), list(step.token.encode())
        if not step.candidates and streamed:  # exclude_unset drops the defaults of a step without logprobs
            return {"token": token, "bytes": list(token.encode())}
        entry = {"token": token, "logprob": FLOOR, "bytes": spelled, "top_logprobs": []}
        if step.candidates:
            shown = step.candidates if self._ask.sampling.extra_ids else step.candidates[: top or 0]
            names = [(self._name(c.token_id, token_text(c.token_id)), clamp(c.logprob)) for c in shown]
            listed = [{"token": name, "logprob": value, "bytes": list(name.encode())} for name, value in names]
            entry |= {"logprob": clamp(step.candidates[0].logprob), "top_logprobs": listed}
        return entry

    def _whole_generate(self, choices: Sequence[Choice], counted: Json) -> Json:
        reply = {"request_id": self._id, "model": self._ask.model, "created": self._created, "usage": counted}
        reply |= {"prompt_logprobs": self._prompt_logprobs(choices[0]), "prompt_token_id_logprobs": None}
        reply |= dict.fromkeys(("prompt_token_ids", "mm_placeholders", "metrics"))
        reply |= dict.fromkeys(("kv_transfer_params", "ec_transfer_params"))
        made = [self._generated(choice, choice.steps, choice.finish_reason, choice.text) for choice in choices]
        return reply | {"output_mode": "text" if self._ask.text_output else "tokens", "choices": made}

    def _generate_head(self) -> Json:
        mode = "text" if self._ask.text_output else "tokens"
        return {"request_id": self._id, "usage": None, "output_mode": mode}

    def _generated(self, choice: Choice, steps: Sequence[Step], finish: str | None, text: str) -> Json:
        versions = [{"version": "default", "start": 0, "end": len(choice.steps)}] if finish is not None else None
        part: Json = {"index": choice.index, "finish_reason": finish, "stop_reason": choice.stop_reason}
        part |= {"token_ids": [step.token_id for step in steps], "routed_experts": None, "sampling_mask": None}
        part |= {"weight_versions": versions}
        asked = self._ask.logprobs
        if self._ask.text_output:
            part |= {"text": text}
            return part | {"logprobs": None if asked is None else self._nan_clamped(self._chat(steps))}
        content = [generate_entry(step, max(asked or 0, 1)) for step in steps]
        return part | {"logprobs": None if asked is None else {"content": content}}

    def _nan_clamped(self, logprobs: Json) -> Json:
        for entry in logprobs["content"]:
            for one in (entry, *entry["top_logprobs"]):
                one["logprob"] = max(FLOOR, one["logprob"])
        return logprobs

    def _prompt_logprobs(self, choice: Choice) -> list[Json | None] | None:
        if self._ask.prompt_logprobs is None or (self._ask.stream and self._ask.route is Route.GENERATE):
            return None
        return [None, *(prompt_entry(row) for row in prompt_logprobs(choice, self._ask.prompt_logprobs))]

    def _prompt_ids(self, prompt: Prompt, asked: bool) -> list[int] | None:
        return list(prompt.ids) if asked else None

    def _name(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._ask.tokens_as_ids else text


def prompt_entry(row: Sequence[Candidate]) -> Json:
    """One prompt position; its NaN is clamped nowhere."""
    return {
        str(c.token_id): {"logprob": c.logprob, "rank": c.rank, "decoded_token": token_text(c.token_id)} for c in row
    }


def generate_entry(step: Step, top: int) -> Json:
    """`max(-9999.0, nan)` is -9999.0: /inference/v1/generate clamps NaN too, and rank 0 becomes null."""
    listed = [
        {"token_id": c.token_id, "logprob": max(FLOOR, c.logprob), "rank": c.rank or None}
        for c in step.candidates[:top]
    ]
    if not listed:
        return {"token_id": step.token_id, "logprob": FLOOR, "rank": None, "top_logprobs": []}
    return dict(listed[0]) | {"top_logprobs": listed}
