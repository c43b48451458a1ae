"""Owns what the deltas of one chat choice add up to: its message, with reasoning and tool calls.

Core. Where vLLM writes a message otherwise than it streams it, and the stream lets one tell, this follows the former.
"""

import json
from typing import Any

from proxy.assemble_choice import AssemblyError, Choice, gather, typed


class ChatChoice(Choice):
    """One choice of a /v1/chat/completions stream."""

    keys = Choice.keys | {"delta"}

    def __init__(self, index: int, request: dict[str, Any]) -> None:
        super().__init__(index, request)
        self._role: str | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._rest: dict[str, Any] = {}
        # vLLM makes "auto" of a tool_choice that is absent where there are tools.
        self._tool_choice = request.get("tool_choice", "auto" if request.get("tools") else "none")

    def values(self, python_server: bool) -> dict[str, Any]:
        calls = [call for _, call in sorted(self._tool_calls.items())]
        content, reasoning = "".join(self._content), "".join(self._reasoning) or None
        finish_reason = self.finish_reason
        is_null = not content
        if python_server:
            finish_reason = self._finish_reason(calls)
            is_null = self._is_null(content, reasoning)
            calls = [_rewritten(call) for call in calls]
        message = self._rest | {
            "role": self._role,
            "content": None if is_null else content,
            "reasoning": reasoning,
        }
        if calls:
            message["tool_calls"] = calls
        return super().values(python_server) | {"message": message, "finish_reason": finish_reason}

    def _read_content(self, chunk: dict[str, Any]) -> None:
        delta = typed(chunk, "delta", dict)
        if delta is None:
            raise AssemblyError("a chunk of the stream has a choice without delta")
        self._role = self._role or typed(delta, "role", str)
        self._content.append(typed(delta, "content", str) or "")
        self._reasoning.append(typed(delta, "reasoning", str) or "")
        for piece in typed(delta, "tool_calls", list) or []:
            self._read_tool_call(piece)
        known = ("role", "content", "reasoning", "tool_calls")
        gather(self._rest, ((key, value) for key, value in delta.items() if key not in known), join=True)

    def _read_tool_call(self, piece: object) -> None:
        if not isinstance(piece, dict) or type(piece.get("index")) is not int:
            raise AssemblyError("a chunk of the stream has a tool call without an index")
        call = self._tool_calls.setdefault(
            piece["index"], {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        gather(call["function"], (typed(piece, "function", dict) or {}).items(), join=True)
        gather(call, ((key, value) for key, value in piece.items() if key not in ("index", "function")))

    def _sampled_logprobs(self, logprobs: dict[str, Any]) -> list[Any]:
        entries = typed(logprobs, "content", list) or []
        return [entry.get("logprob") if isinstance(entry, dict) else None for entry in entries]

    def _is_null(self, content: str, reasoning: str | None) -> bool:
        """vLLM's parsers leave nothing, not "", beside reasoning or calls, but for a forced call."""
        if self._tool_choice == "required" or isinstance(self._tool_choice, dict):
            return False
        return not content.strip() if self._tool_calls else not content and reasoning is not None

    def _finish_reason(self, calls: list[dict[str, Any]]) -> str | None:
        match self._tool_choice, self.finish_reason:
            case "required", "stop":
                return "tool_calls"
            case "auto", "length" if calls and all(_is_json(call["function"]["arguments"]) for call in calls):
                return "tool_calls"
        return self.finish_reason


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _rewritten(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments spaced as vLLM's parsers write them; a call that is cut short stays as it is."""
    function = call["function"]
    if not _is_json(function["arguments"]):
        return call
    arguments = json.dumps(json.loads(function["arguments"]), ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}
