"""What a request to the stand-in asks for, or why vLLM would refuse it. Pure: a body and a config in, an `Ask` out."""

from dataclasses import dataclass
from typing import Any

from proxy.simulator.config import FrontEnd, SimulatorConfig
from proxy.simulator.engine import Prompt, Sampling
from proxy.simulator.prompts import Route, read_max_tokens, read_prompts, read_sampling
from proxy.simulator.refusals import Refusal, integer, invalid, validation_error

__all__ = ["Ask", "Route", "read_ask"]


@dataclass(frozen=True, slots=True)
class Ask:
    route: Route
    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    n: int = 1
    stream: bool = False
    logprobs: int | None = None  # None: not asked for
    prompt_logprobs: int | None = None
    echo: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    stream_interval: int = 1
    text_output: bool = False  # /inference/v1/generate with output_mode "text"
    cache_salt: str | None = None
    prompt_only: bool = False  # echo with max_tokens 0: one token is generated and not returned
    cut_at: int | None = None  # tests: the connection breaks before this token
    die_at: int | None = None  # tests: the engine dies before this token
    fields: dict[str, Any] | None = None  # the request's own fields that /v1/responses repeats


def read_ask(config: SimulatorConfig, route: Route, body: dict[str, Any], seed: int) -> Ask:
    """The `Ask` of one request; `seed` is used where the request brings none."""
    params = _params(config, route, body)
    faults = params["vllm_xargs"]
    stream = body.get("stream") is True and route is not Route.BATCH
    logprobs, prompt_logprobs = _logprobs(config, route, body, params, stream)
    prompts = read_prompts(config, route, body)
    n = integer(params, "n") or 1
    _refuse_unsupported(config, route, body, n, stream)
    echo = body.get("echo") is True and route is Route.COMPLETIONS
    if echo and logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = logprobs
    asked = _tokens_asked(route, params)
    prompt_only = echo and asked == 0
    max_tokens = read_max_tokens(config, route, prompts, 1 if prompt_only else asked)
    options = body.get("stream_options") or {}
    return Ask(
        route=route,
        model=config.model,
        prompts=prompts,
        sampling=read_sampling(params, max_tokens, logprobs, seed),
        n=n,
        stream=stream,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        return_token_ids=body.get("return_token_ids") is True,
        tokens_as_ids=body.get("return_tokens_as_token_ids") is True,
        stream_interval=integer(body, "stream_interval") or 1,
        text_output=body.get("output_mode") == "text",
        cache_salt=body.get("cache_salt"),
        prompt_only=prompt_only,
        cut_at=faults.get("cut_at"),
        die_at=faults.get("die_at"),
        fields=body if route is Route.RESPONSES else None,
    )


def _params(config: SimulatorConfig, route: Route, body: dict[str, Any]) -> dict[str, Any]:
    """Where the sampling parameters stand, and the faults a test ordered, whatever the route."""
    if (model := body.get("model")) not in (None, "", config.model):
        raise Refusal(f"The model `{model}` does not exist.", status=404, param="model", code="model_not_found")
    params = body.get("sampling_params") if route is Route.GENERATE else body
    if not isinstance(params, dict):
        raise validation_error({"type": "missing", "loc": "body.sampling_params", "msg": "Field required"})
    return params | {"vllm_xargs": body.get("vllm_xargs") or {}}


def _tokens_asked(route: Route, params: dict[str, Any]) -> int | None:
    asked = integer(params, "max_output_tokens" if route is Route.RESPONSES else "max_tokens")
    if asked is None and route in (Route.CHAT, Route.BATCH):
        return integer(params, "max_completion_tokens")
    return asked


def _logprobs(
    config: SimulatorConfig, route: Route, body: dict[str, Any], params: dict[str, Any], stream: bool
) -> tuple[int | None, int | None]:
    count: int | None
    if route in (Route.CHAT, Route.BATCH):
        top = integer(body, "top_logprobs")
        if top and not body.get("logprobs"):
            raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        count = (top or 0) if body.get("logprobs") is True else None
    elif route is Route.RESPONSES:
        wanted = "message.output_text.logprobs" in (body.get("include") or ())
        count = (integer(body, "top_logprobs") or 0) if wanted else None
    else:
        count = integer(params, "logprobs")
    prompt_count = integer(params, "prompt_logprobs")
    for kind, name, value in (("sample", "logprobs", count), ("prompt", "prompt_logprobs", prompt_count)):
        value = config.vocab_size if value == -1 else value
        if value is not None and value > config.max_logprobs:
            text = f"Requested {kind} logprobs of {value}, which is greater than max allowed: {config.max_logprobs}"
            raise invalid(text, name, value)
        if value is not None and value < 0:
            raise invalid(f"`{name}` must be a positive value or -1.", name, value)
    if stream and prompt_count and route is not Route.GENERATE:
        if config.front_end is FrontEnd.RUST:
            raise Refusal("`prompt_logprobs` are not available when `stream=true`.", param="prompt_logprobs")
        raise invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    return count, prompt_count


def _refuse_unsupported(config: SimulatorConfig, route: Route, body: dict[str, Any], n: int, stream: bool) -> None:
    if n < 1:
        raise invalid(f"n must be at least 1, got {n}.", "n", n)
    if config.front_end is FrontEnd.RUST and (n > 1 or body.get("use_beam_search")):
        raise Refusal("Only n=1 without beam search is supported.", param="n")
    if route is Route.BATCH and n > 1:
        raise invalid("Batch chat completions do not support `n > 1`. Please set `n` to 1.", "n", n)
    if stream and body.get("use_beam_search"):
        raise Refusal("Streaming is not currently supported with beam search")
    if body.get("stream_options") and not body.get("stream"):
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
