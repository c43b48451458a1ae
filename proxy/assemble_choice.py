"""Owns what the chunks of one choice add up to, and the run of unscorable tokens at its end.

Core. Judges and marks nothing: nulls stay where the stream had them, and lists are only ever appended to.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import accumulate, takewhile
from typing import Any, TypeVar

from proxy.unscorable import FLOOR

T = TypeVar("T")


class AssemblyError(Exception):
    """The stream does not add up to a reply: an error event, a stream cut short, or not what the route sends."""


class Choice(ABC):
    """One choice of a stream, fed with its chunks in order of arrival; what it says is its subclass's to read."""

    # Keys of a chunk that are read; whatever nobody reads is kept as it came.
    keys = frozenset(("index", "logprobs", "token_ids", "prompt_token_ids", "finish_reason", "stop_reason"))

    def __init__(self, index: int, request: dict[str, Any]) -> None:
        self.index = index
        self.request = request
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.logprobs: dict[str, Any] | None = None
        self.token_ids: list[int] | None = None
        self.prompt_token_ids: list[int] | None = None
        self.extra: dict[str, Any] = {}
        # None where the chunks do not tell.
        self.sampled: int | None = 0
        self.unscorable_tail = 0
        self._chunks = 0
        self._echoes = False

    def feed(self, chunk: dict[str, Any]) -> None:
        """Adds one element of a chunk's `choices`; raises AssemblyError on a foreign shape."""
        self._read_content(chunk)
        logprobs = typed(chunk, "logprobs", dict)
        ids = typed(chunk, "token_ids", list)
        self._count(logprobs, ids)
        if logprobs is not None:
            self.logprobs = gather(self.logprobs or {}, logprobs.items())
        if ids is not None:
            self.token_ids = self.token_ids or []
            self.token_ids.extend(ids)
        self.prompt_token_ids = self.prompt_token_ids or typed(chunk, "prompt_token_ids", list)
        reason = typed(chunk, "finish_reason", str)
        if reason == "error":
            raise AssemblyError(f"the engine ended choice {self.index} with an error")
        self.finish_reason = reason or self.finish_reason
        if chunk.get("stop_reason") is not None:
            self.stop_reason = chunk["stop_reason"]
        gather(self.extra, ((key, value) for key, value in chunk.items() if key not in self.keys))
        self._chunks += 1

    def abort(self) -> None:
        """Ends the choice the way vLLM ends one it aborts."""
        self.finish_reason = "abort"

    def values(self, python_server: bool) -> dict[str, Any]:
        """What the reply says of this choice; keys that came to nothing may be left out."""
        return self.extra | {
            "index": self.index,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "token_ids": self.token_ids,
        }

    @abstractmethod
    def _read_content(self, chunk: dict[str, Any]) -> None:
        """Adds what the model said."""

    @abstractmethod
    def _sampled_logprobs(self, logprobs: dict[str, Any]) -> list[Any]:
        """The logprob at each position of a chunk."""

    def _count(self, logprobs: dict[str, Any] | None, ids: list[int] | None) -> None:
        """Counts the chunk's sampled tokens and the unscorable ones that end the choice so far."""
        logprob_list = [] if logprobs is None else self._sampled_logprobs(logprobs)
        if not logprob_list and ids and self._asks_logprobs():
            logprob_list = [None] * len(ids)
        if self._echoes and self._chunks == 0:
            # The first chunk of an echo holds the prompt's positions as well, which nobody sampled.
            self.sampled = None if ids is None else 0
            logprob_list = logprob_list[max(0, len(logprob_list) - (1 if ids is None else len(ids))) :]
        if self.sampled is not None:
            self.sampled += len(logprob_list) if ids is None else len(ids)
        run = sum(1 for _ in takewhile(_is_unscorable, reversed(logprob_list)))
        self.unscorable_tail = run + (self.unscorable_tail if run == len(logprob_list) else 0)

    def _asks_logprobs(self) -> bool:
        return self.request.get("logprobs") is not None and self.request["logprobs"] is not False


class CompletionChoice(Choice):
    """One choice of a /v1/completions stream."""

    keys = Choice.keys | {"text"}

    def __init__(self, index: int, request: dict[str, Any]) -> None:
        super().__init__(index, request)
        self._echoes = request.get("echo") is True
        self._text: list[str] = []

    def values(self, python_server: bool) -> dict[str, Any]:
        if not python_server and self.logprobs is not None:
            self.logprobs |= _counted_offsets(self.logprobs)
        return super().values(python_server) | {
            "text": "".join(self._text),
            "prompt_token_ids": self.prompt_token_ids,
        }

    def _read_content(self, chunk: dict[str, Any]) -> None:
        if "text" not in chunk:
            raise AssemblyError("a chunk of the stream has a choice without text")
        self._text.append(typed(chunk, "text", str) or "")

    def _sampled_logprobs(self, logprobs: dict[str, Any]) -> list[Any]:
        return typed(logprobs, "token_logprobs", list) or []


def _counted_offsets(logprobs: dict[str, Any]) -> dict[str, Any]:
    """Offsets over the tokens, as the Rust front end writes them; its streams have offsets into text that lags."""
    tokens = logprobs.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return {}
    return {"text_offset": [*accumulate(map(len, tokens[:-1]), initial=0)]} if tokens else {}


def typed(holder: dict[str, Any], key: str, kind: type[T]) -> T | None:
    """`holder[key]`, None where it is null or absent; raises AssemblyError where it is something else."""
    value = holder.get(key)
    if value is not None and not isinstance(value, kind):
        raise AssemblyError(f"a chunk of the stream has a {type(value).__name__} where {key} belongs")
    return value


def gather(into: dict[str, Any], more: Iterable[tuple[str, Any]], *, join: bool = False) -> dict[str, Any]:
    """`into` with `more` added: lists are appended, of other values the last that is not null stays.

    `join`: strings are pieces of one string.
    """
    for key, value in more:
        before = into.get(key)
        if isinstance(before, list) and isinstance(value, list):
            before.extend(value)
        elif join and isinstance(before, str) and isinstance(value, str):
            into[key] = before + value
        elif value is not None or key not in into:
            into[key] = [*value] if isinstance(value, list) else value
    return into


def _is_unscorable(logprob: object) -> bool:
    if isinstance(logprob, bool) or not isinstance(logprob, int | float):
        return True
    return not math.isfinite(logprob) or logprob <= FLOOR
