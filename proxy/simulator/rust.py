"""JSON of vLLM's Rust server: its key order, shortest float32 values, absent null keys, -9999.0 wherever NaN was."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from proxy.simulator.engine import Candidate, Choice, Step, prompt_logprobs, single
from proxy.simulator.requests import Ask, Route
from proxy.simulator.shapes import FLOOR, Json, total_usage, usage
from proxy.simulator.vocabulary import SPECIALS, spelling

DETAILS = {"prompt_tokens_details": None, "completion_tokens_details": {"reasoning_tokens": 0}}
ABORTED = "completion stream requested logprobs but generation returned none"


def shortest(logprob: float) -> float:
    """The fewest digits that still name the float32; NaN and -inf become the floor, with HTTP 200."""
    if not logprob > FLOOR:
        return FLOOR
    for digits in range(6, 9):
        if single(value := float(f"{logprob:.{digits}g}")) == logprob:
            return value
    return float(f"{logprob:.9g}")


def token_text(token_id: int) -> str:
    """Each token decoded by itself, specials skipped."""
    return "" if token_id < len(SPECIALS) else spelling(token_id).decode("utf-8", "replace")


class RustShapes:
    def __init__(self, ask: Ask, request_id: str, created: int) -> None:
        self._ask, self._id, self._created = ask, request_id, created
        self._shown = 0  # characters sent: where the next chunk's text_offset starts

    def whole(self, choices: Sequence[Choice]) -> Json:
        choice, ask = choices[0], self._ask
        if ask.route is Route.GENERATE:
            reply: Json = {"request_id": self._id, "choices": [self._generated(choice, choice.steps, streamed=False)]}
            reply |= {"prompt_logprobs": self._prompt_logprobs(choice), "prompt_token_id_logprobs": None}
            reply |= dict.fromkeys(("prompt_token_ids", "mm_placeholders", "kv_transfer_params", "ec_transfer_params"))
            return reply | {"metrics": None}
        completions = ask.route is Route.COMPLETIONS
        part = self._completion(choice) if completions else self._message(choice)
        reply = self._head("") | {"choices": [part], "usage": total_usage(choices) | DETAILS}
        reply |= {"system_fingerprint": None}
        if not completions:
            ids = list(choice.prompt.ids) if ask.return_token_ids else None
            reply |= {"prompt_logprobs": self._prompt_logprobs(choice), "prompt_token_ids": ids}
        return reply | {"kv_transfer_params": None, "ec_transfer_params": None}

    def opening(self, choices: Sequence[Choice]) -> Iterator[Json]:
        choice, ask = choices[0], self._ask
        ids: Json = {"prompt_token_ids": list(choice.prompt.ids)} if ask.return_token_ids else {}
        match ask.route:
            case Route.CHAT:
                yield self._head(".chunk") | {"choices": [{"index": 0, "delta": {"role": "assistant"}}]} | ids
            case Route.COMPLETIONS if ask.return_token_ids or ask.logprobs is None:
                own: Json = {"token_ids": []} | ids if ask.return_token_ids else {}
                yield self._with_usage(self._head("") | {"choices": [{"index": 0, "text": ""} | own]}, choice, 0)

    def chunk(self, choice: Choice, steps: Sequence[Step], delta: str, first: bool) -> Iterator[Json]:
        ask = self._ask
        if ask.route is Route.GENERATE:
            yield {"request_id": self._id, "choices": [self._generated(choice, steps, streamed=True)]}
            return
        ids: Json = {"token_ids": [step.token_id for step in steps]} if ask.return_token_ids else {}
        completions = ask.route is Route.COMPLETIONS
        finish: Json = {"index": 0, "text": ""} if completions else {"index": 0, "delta": {}}
        part: Json = {"index": 0, "text": delta} if completions else {"index": 0, "delta": _content(delta)}
        if ask.logprobs is not None:
            part |= {"logprobs": self._columns(choice, steps, self._shown) if completions else self._chat(steps)}
        self._shown += len(delta)
        if steps:
            yield self._with_usage(self._head(".chunk") | {"choices": [part | ids]}, choice, len(choice.steps))
        if choice.finish_reason is None:
            return
        if choice.finish_reason == "abort" and completions and ask.logprobs is not None:
            kind = "server_error"
            yield {"error": {"message": ABORTED, "type": kind, "param": None, "code": kind}}
            return
        finish |= {"finish_reason": choice.finish_reason}
        if choice.stop_reason is not None:
            finish |= {"stop_reason": choice.stop_reason}
        if completions and ask.return_token_ids:
            finish |= {"token_ids": []}
        yield self._with_usage(self._head(".chunk") | {"choices": [finish]}, choice, len(choice.steps))

    def closing(self, choices: Sequence[Choice]) -> Iterator[Json]:
        if self._ask.include_usage:
            counted = {"choices": [], "usage": total_usage(choices) | DETAILS}
            generate = self._ask.route is Route.GENERATE
            yield ({"request_id": self._id} if generate else self._head(".chunk")) | counted

    def _head(self, suffix: str) -> Json:
        kind = "text_completion" if self._ask.route is Route.COMPLETIONS else "chat.completion" + suffix
        return {"id": self._id, "object": kind, "created": self._created, "model": self._ask.model}

    def _with_usage(self, chunk: Json, choice: Choice, tokens: int) -> Json:
        if self._ask.continuous_usage and self._ask.include_usage:
            chunk |= {"usage": usage(len(choice.prompt.ids), tokens) | DETAILS}
        return chunk

    def _completion(self, choice: Choice) -> Json:
        ask = self._ask
        prompt_text = choice.prompt.text if ask.echo and not ask.return_token_ids else ""
        steps = [] if ask.prompt_only else choice.steps
        return {
            "index": 0,
            "text": prompt_text + ("" if ask.prompt_only else choice.text),
            "logprobs": None if ask.logprobs is None else self._columns(choice, steps, 0, echoed=ask.echo),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": self._prompt_logprobs(choice),
            "token_ids": [step.token_id for step in steps] if ask.return_token_ids else None,
            "prompt_token_ids": list(choice.prompt.ids) if ask.return_token_ids else None,
        }

    def _columns(self, choice: Choice, steps: Sequence[Step], offset: int, echoed: bool = False) -> Json:
        rows: list[tuple[int, Sequence[Candidate]]] = []
        if echoed:
            candidates = [(), *prompt_logprobs(choice, self._ask.logprobs or 0)]
            rows += zip(choice.prompt.ids, candidates, strict=True)
        rows += [(step.token_id, step.candidates or (Candidate(step.token_id, FLOOR, 0),)) for step in steps]
        columns: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, row in rows:
            token = self._name(token_id)
            columns["tokens"].append(token)
            columns["token_logprobs"].append(shortest(row[0].logprob) if row else None)
            columns["top_logprobs"].append(
                _shuffled({self._name(c.token_id): shortest(c.logprob) for c in row} or None)
            )
            columns["text_offset"].append(offset)
            offset += len(token)
        return columns

    def _message(self, choice: Choice) -> Json:
        return {
            "index": 0,
            "message": {"role": "assistant", "content": choice.text or None, "reasoning": None},
            "logprobs": None if self._ask.logprobs is None else self._chat(choice.steps),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": [step.token_id for step in choice.steps] if self._ask.return_token_ids else None,
        }

    def _chat(self, steps: Sequence[Step]) -> Json:
        content = []
        for step in steps:
            row = step.candidates or (Candidate(step.token_id, FLOOR, 0),)
            listed = [self._entry(c) for c in row[: self._ask.logprobs or 0]]
            content.append(self._entry(row[0]) | {"top_logprobs": listed})
        return {"content": content}

    def _entry(self, one: Candidate) -> Json:
        token = self._name(one.token_id)
        return {"token": token, "logprob": shortest(one.logprob), "bytes": list(token.encode())}

    def _generated(self, choice: Choice, steps: Sequence[Step], streamed: bool) -> Json:
        content = [_generate_entry(step, max(self._ask.logprobs or 0, 1)) for step in steps]
        logprobs = None if self._ask.logprobs is None else {"content": content}
        versions = [{"version": "default", "start": 0, "end": len(choice.steps)}]
        finished = choice.finish_reason is not None
        part: Json = {"index": 0}
        if not streamed:
            part |= {"logprobs": logprobs, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            part |= {"token_ids": [step.token_id for step in steps], "sampling_mask": None}
            return part | {"weight_versions": versions}
        part |= {"logprobs": logprobs} if logprobs is not None and steps else {}
        part |= {"finish_reason": choice.finish_reason} if finished else {}
        part |= {"stop_reason": choice.stop_reason} if choice.stop_reason is not None else {}
        part |= {"token_ids": [step.token_id for step in steps]}
        return part | ({"weight_versions": versions} if finished else {})

    def _prompt_logprobs(self, choice: Choice) -> list[Json | None] | None:
        if self._ask.prompt_logprobs is None:
            return None
        generate = self._ask.route is Route.GENERATE
        rows = []
        for row in prompt_logprobs(choice, self._ask.prompt_logprobs):
            names = {c: f"token_id:{c.token_id}" if generate else token_text(c.token_id) for c in row}
            rows.append(
                _shuffled(
                    {
                        str(c.token_id): {"logprob": shortest(c.logprob), "rank": c.rank, "decoded_token": names[c]}
                        for c in row
                    }
                )
            )
        return [None, *rows]

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._ask.tokens_as_ids else token_text(token_id)


def _content(delta: str) -> Json:
    return {"content": delta} if delta else {}


def _shuffled(entries: dict[str, Any] | None) -> dict[str, Any] | None:
    """A Rust hash map: the order of its keys differs from call to call."""
    if entries is None or len(entries) < 2:
        return entries
    return dict(random.sample(list(entries.items()), len(entries)))


def _generate_entry(step: Step, top: int) -> Json:
    row = step.candidates or (Candidate(step.token_id, FLOOR, 0),)
    listed: list[Json] = [
        {"token_id": c.token_id, "logprob": shortest(c.logprob), "rank": c.rank or None} for c in row[:top]
    ]
    if row[0].logprob != row[0].logprob:
        listed[0]["rank"] = None  # NaN has no rank, but the candidates beside it keep theirs
    return listed[0] | {"top_logprobs": listed}
