"""Owns which keys vLLM's two servers write in a non-streamed reply, and in which order.

Core. A stream leaves out what is null; here it comes back. Keys that vLLM 0.32 does not know go last.
"""

from dataclasses import dataclass
from typing import Any

from proxy.api import Api


@dataclass(frozen=True, slots=True)
class Layout:
    """Keys of a reply, of its choices and of their messages, as one server writes them."""

    reply: tuple[str, ...]
    choice: tuple[str, ...]
    message: tuple[str, ...] = ()


_HEAD = ("id", "object", "created", "model", "choices")
_TAIL = ("kv_transfer_params", "ec_transfer_params")
_USAGE = ("prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details")
_PROMPT_DETAILS = ("cached_tokens", "created_cache_tokens", "multimodal_tokens")
_METRICS = (
    *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"),
    "speculative_decoding",
)
_FINISH = ("finish_reason", "stop_reason")

_PYTHON = {
    Api.COMPLETIONS: Layout(
        reply=(*_HEAD, "service_tier", "system_fingerprint", "usage", *_TAIL, "metrics"),
        choice=(
            *("index", "text", "logprobs", *_FINISH, "token_ids"),
            *("prompt_logprobs", "prompt_token_ids", "routed_experts"),
        ),
    ),
    Api.CHAT: Layout(
        reply=(
            *(*_HEAD, "service_tier", "system_fingerprint", "usage"),
            *("prompt_logprobs", "prompt_token_ids", "prompt_text", *_TAIL, "metrics"),
        ),
        choice=("index", "message", "logprobs", *_FINISH, "token_ids", "routed_experts"),
        message=(
            *("role", "content", "refusal", "annotations", "audio", "function_call"),
            *("tool_calls", "reasoning"),
        ),
    ),
}
_RUST = {
    Api.COMPLETIONS: Layout(
        reply=(*_HEAD, "usage", "system_fingerprint", *_TAIL),
        choice=("index", "text", "logprobs", *_FINISH, "prompt_logprobs", "token_ids", "prompt_token_ids"),
    ),
    Api.CHAT: Layout(
        reply=(*_HEAD, "usage", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", *_TAIL),
        choice=("index", "message", "logprobs", *_FINISH, "token_ids"),
        message=("role", "content", "tool_calls", "reasoning"),
    ),
}


def lay_out(api: Api, python_server: bool, values: dict[str, Any]) -> dict[str, Any]:
    """The reply with `values`, whose choices and messages are put in order as well."""
    layout = (_PYTHON if python_server else _RUST)[api]
    choices = []
    for choice in values["choices"]:
        ordered = _order(layout.choice, choice)
        if layout.message:
            message = _order(layout.message, choice["message"])
            if not message["tool_calls"]:
                del message["tool_calls"]
            ordered["message"] = message
        choices.append(ordered)
    reply = _order(layout.reply, values | {"choices": choices})
    if (usage := reply["usage"]) is not None:
        reply["usage"] = usage = _order(_USAGE, usage)
        if python_server and usage["prompt_tokens_details"] is not None:
            usage["prompt_tokens_details"] = _order(_PROMPT_DETAILS, usage["prompt_tokens_details"])
    if python_server and reply["metrics"] is not None:
        reply["metrics"] = _order(_METRICS, reply["metrics"])
    return reply


def _order(keys: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    return {key: values.get(key) for key in keys} | values
