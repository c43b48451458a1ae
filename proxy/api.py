"""The routes whose replies carry logprobs, and what one request asked of them. Core: values in, values out."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from proxy import jsonbody


class Api(StrEnum):
    """A generation route; the value is its path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    BATCH = "/v1/chat/completions/batch"
    RESPONSES = "/v1/responses"
    GENERATE = "/inference/v1/generate"
    INVOCATIONS = "/invocations"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asked for, as far as judging its reply needs it.

    ``body`` is None where the request is no JSON object: such a request is vLLM's to judge.
    """

    api: Api
    body: dict[str, Any] | None = None
    logprobs: bool = False
    echo: bool = False
    stream: bool = False


def read_request(api: Api, raw: bytes) -> Asked:
    """Reads the request body; INVOCATIONS becomes the API whose shape the body has."""
    try:
        body = jsonbody.loads(raw)
    except jsonbody.InvalidJson:
        return Asked(api)
    if not isinstance(body, dict):
        return Asked(api)
    if api is Api.INVOCATIONS:
        api = Api.CHAT if "messages" in body else Api.COMPLETIONS
    echo = api is Api.COMPLETIONS and body.get("echo") is True  # chat echoes text, never its logprobs
    return Asked(api, body, _asks_logprobs(api, body), echo, body.get("stream") is True)


def _asks_logprobs(api: Api, body: dict[str, Any]) -> bool:
    match api:
        case Api.COMPLETIONS:
            return body.get("logprobs") is not None and body["logprobs"] is not False
        case Api.CHAT | Api.BATCH:
            return body.get("logprobs") is True
        case Api.GENERATE:
            params = body.get("sampling_params")
            return isinstance(params, dict) and params.get("logprobs") is not None
        case Api.RESPONSES:
            return "message.output_text.logprobs" in (body.get("include") or ())
        case Api.INVOCATIONS:
            return False
