"""Owns the way from a streamed reply to the non-streamed one its request asked for, and which requests can go it.

Core: fed the data of one event at a time. Marks nothing: nulls leave where they came. What a stream does not carry is
null in the reply; a stream that has not come to its end gives no reply at all.
"""

import json
from typing import Any

import orjson

from proxy import jsonbody
from proxy.api import Api
from proxy.assemble_chat import ChatChoice
from proxy.assemble_choice import AssemblyError, Choice, CompletionChoice, gather, typed
from proxy.assemble_layout import lay_out

__all__ = ["Assembly", "AssemblyError", "stream_request"]

_OBJECTS = {Api.COMPLETIONS: "text_completion", Api.CHAT: "chat.completion"}
# Said of the whole reply, by every chunk or by one per choice.
_ONCE = ("id", "created", "model", "prompt_token_ids")


def stream_request(api: Api, body: dict[str, Any]) -> dict[str, Any] | None:
    """The same request as a stream, None where a stream cannot carry its reply.

    Beside `stream` and `include_usage` it asks for what tells the length of the prompt early, so that a reply cut
    short has its usage: completions for usage on every chunk; chat, where vLLM counts reasoning anew for each such
    chunk, for token ids.
    """
    if api not in _OBJECTS or not _streams_whole(api, body):
        return None
    options = body.get("stream_options")
    options = (options if isinstance(options, dict) else {}) | {"include_usage": True}
    if api is Api.CHAT:
        return body | {"stream": True, "stream_options": options, "return_token_ids": True}
    return body | {"stream": True, "stream_options": options | {"continuous_usage_stats": True}}


def _streams_whole(api: Api, body: dict[str, Any]) -> bool:
    # vLLM refuses prompt_logprobs above 0 with a stream, and drops them without a word at 0.
    if body.get("prompt_logprobs") is not None or body.get("use_beam_search"):
        return False
    # vLLM's streamed echo of several choices fails now and then: they race for the prompt's logprobs.
    if api is Api.COMPLETIONS and body.get("echo") and _per_prompt(body) > 1:
        return False
    # The prefill half of a disaggregated pair answers with what its decoder needs, and no chunk holds it.
    transfer = body.get("kv_transfer_params")
    return not (isinstance(transfer, dict) and transfer.get("do_remote_decode"))


class Assembly:
    """One streamed reply being folded; created per reply."""

    def __init__(self, api: Api, request: dict[str, Any]) -> None:
        if api not in _OBJECTS:
            raise ValueError(f"{api} has no stream to fold")
        kind = ChatChoice if api is Api.CHAT else CompletionChoice
        self._api = api
        self._request = request
        self._prompt_lengths: list[int | None] = [None] if api is Api.CHAT else _prompt_lengths(request)
        self._choices: list[Choice] = [
            kind(index, request) for index in range(len(self._prompt_lengths) * _per_prompt(request))
        ]
        # Ids the client has not asked for: stream_request has, and vLLM's streamed echo has the prompt's anyway.
        self._hidden = {"prompt_token_ids", "token_ids"} if api is Api.CHAT else {"prompt_token_ids"}
        if request.get("return_token_ids"):
            self._hidden = set()
        self._reply: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._python_server = True
        self._strict = True
        self._done = False

    @property
    def complete(self) -> bool:
        """Every choice the request asked for has a finish_reason."""
        return not self._open

    @property
    def _open(self) -> list[Choice]:
        return [choice for choice in self._choices if choice.finish_reason is None]

    def feed(self, data: bytes) -> None:
        """Takes the data of one event, never [DONE]; raises AssemblyError, after which there is no reply."""
        chunk = self._read(data)
        choices = typed(chunk, "choices", list)
        if choices is None:
            raise AssemblyError("an event of the stream has no choices")
        usage = typed(chunk, "usage", dict)
        for piece in choices:
            choice = self._choice_of(piece)
            choice.feed(piece)
            self._count(choice, usage)
        if usage is not None and not choices:
            self._usage = usage
        if (prompt := typed(chunk, "prompt_token_ids", list)) is not None:
            self._prompt_lengths[0] = len(prompt)
        read = ("object", "choices", "usage", *(key for key in _ONCE if self._reply.get(key) is not None))
        gather(self._reply, ((key, value) for key, value in chunk.items() if key not in read))

    def done(self) -> None:
        """The stream has said [DONE]."""
        self._done = True

    def runaway(self, limit: int) -> bool:
        """Every open choice, and there is one, ends in `limit` or more unscorable tokens in a row."""
        return limit > 0 and not self.complete and all(choice.unscorable_tail >= limit for choice in self._open)

    def abort_open(self) -> None:
        """Ends the choices that are open with finish_reason "abort": the reply is what has come so far."""
        for choice in self._open:
            choice.abort()

    def reply(self) -> bytes:
        """The non-streamed reply; raises AssemblyError unless `complete`."""
        if not self.complete:
            missing = ", ".join(str(choice.index) for choice in self._open)
            ended = "said [DONE]" if self._done else "ended"
            raise AssemblyError(f"the stream {ended} before choice {missing} had a finish_reason")
        values = self._reply | {
            "object": _OBJECTS[self._api],
            "choices": [choice.values(self._python_server) for choice in self._choices],
            "usage": self._usage or self._counted_usage(),
        }
        for holder in (values, *values["choices"]):
            holder.update(dict.fromkeys(self._hidden & holder.keys()))
        reply = lay_out(self._api, self._python_server, values)
        # orjson would write a NaN literal, which only other servers' streams hold, as null.
        return jsonbody.dumps(reply) if self._strict else json.dumps(reply, separators=(",", ":")).encode()

    def _read(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            self._strict = False
            try:
                chunk = jsonbody.loads(data)
            except jsonbody.InvalidJson as reason:
                raise AssemblyError(f"an event of the stream is no JSON: {reason}") from reason
        if not isinstance(chunk, dict):
            raise AssemblyError("an event of the stream is no JSON object")
        if (error := chunk.get("error")) is not None or chunk.get("object") == "error":
            message = error.get("message") if isinstance(error, dict) else error or chunk.get("message")
            raise AssemblyError(f"the stream ended in an error: {message}")
        return chunk

    def _choice_of(self, piece: object) -> Choice:
        if not isinstance(piece, dict):
            raise AssemblyError("a choice of the stream is no JSON object")
        index = piece.get("index")
        if type(index) is not int or not 0 <= index < len(self._choices):
            raise AssemblyError(f"a chunk of the stream is of choice {index!r}, of {len(self._choices)} asked for")
        # Only the Rust front end leaves out a finish_reason that is null.
        self._python_server = self._python_server and "finish_reason" in piece
        if not self._python_server and self._api is Api.COMPLETIONS and self._request.get("echo"):
            raise AssemblyError("the stream of this server leaves out the prompt that echo asked for")
        return self._choices[index]

    def _count(self, choice: Choice, usage: dict[str, Any] | None) -> None:
        prompt = choice.index // _per_prompt(self._request)
        if choice.prompt_token_ids is not None:
            self._prompt_lengths[prompt] = len(choice.prompt_token_ids)
        if usage is not None:
            self._prompt_lengths[prompt] = typed(usage, "prompt_tokens", int)
            choice.sampled = typed(usage, "completion_tokens", int) or choice.sampled

    def _counted_usage(self) -> dict[str, Any] | None:
        """Usage of a reply whose stream was cut before it told; None where some tokens cannot be counted."""
        prompts = [length for length in self._prompt_lengths if length is not None]
        sampled = [choice.sampled for choice in self._choices if choice.sampled]
        if len(prompts) < len(self._prompt_lengths) or len(sampled) < len(self._choices):
            return None
        prompt_tokens, completion_tokens = sum(prompts), sum(sampled)
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }


def _per_prompt(request: dict[str, Any]) -> int:
    n = request.get("n")
    return n if isinstance(n, int) and n > 0 else 1


def _prompt_lengths(request: dict[str, Any]) -> list[int | None]:
    """One element a prompt, in vLLM's order: its tokens where the request tells, else None."""
    embeds, prompt = request.get("prompt_embeds"), request.get("prompt")
    lengths: list[int | None] = [None] * (len(embeds) if isinstance(embeds, list) else embeds is not None)
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        lengths += [len(one) if isinstance(one, list) else None for one in prompt]
    elif prompt is not None:
        lengths.append(len(prompt) if isinstance(prompt, list) else None)
    if request.get("truncate_prompt_tokens") is not None:
        lengths = [None] * len(lengths)
    return lengths or [None]
