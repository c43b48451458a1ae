"""The prompts and the sampling parameters of a request to the stand-in. Pure."""

from enum import StrEnum
from typing import Any

from proxy.simulator.config import FrontEnd, SimulatorConfig
from proxy.simulator.engine import Prompt, Sampling
from proxy.simulator.refusals import Refusal, integer, invalid, validation_error
from proxy.simulator.vocabulary import decode, encode, render_chat

FORCING_BIAS = 50  # no logprob difference of the simulated model comes near it


class Route(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"
    BATCH = "batch"
    RESPONSES = "responses"
    GENERATE = "generate"


def read_prompts(config: SimulatorConfig, route: Route, body: dict[str, Any]) -> tuple[Prompt, ...]:
    if route is Route.GENERATE:
        found = [body.get("token_ids")]
    elif route is Route.COMPLETIONS:
        found = _completion_prompts(config, body.get("prompt"))
    elif route is Route.RESPONSES:
        given = body.get("input", "")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if instructions := body.get("instructions"):
            messages = [{"role": "system", "content": instructions}, *messages]
        found = [_chat(messages, body)]
    else:
        conversations = body.get("messages") if route is Route.BATCH else [body.get("messages")]
        found = [_chat(messages, body) for messages in conversations or [None]]
    return tuple(_prompt(config, one) for one in found)


def _completion_prompts(config: SimulatorConfig, given: object) -> list[Any]:
    if given is None and config.front_end is FrontEnd.RUST:
        text = "Failed to deserialize the JSON body into the target type: missing field `prompt`"
        raise Refusal(text, code="json_parse_error")
    if given is None or given == "" or given == []:
        raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if not isinstance(given, list) or isinstance(given[0], int):
        return [given]
    if config.front_end is FrontEnd.RUST:
        text = "prompt: data did not match any variant of untagged enum Prompt"
        text = f"Failed to deserialize the JSON body into the target type: {text} at line 1 column 34"
        raise Refusal(text, code="json_parse_error")
    return given


def _chat(messages: Any, body: dict[str, Any]) -> str:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise validation_error({"type": "missing", "loc": "body.messages", "msg": "Field required"})
    turns = [(str(m.get("role", "user")), _content(m.get("content"))) for m in messages]
    return render_chat(turns, body.get("add_generation_prompt") is not False)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _prompt(config: SimulatorConfig, given: Any) -> Prompt:
    ids = encode(given) if isinstance(given, str) else given
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise validation_error({"type": "list_type", "loc": "body.prompt", "msg": "Input should be a valid list"})
    if outside := [i for i in ids if not 0 <= i < config.vocab_size]:
        if config.front_end is FrontEnd.RUST:
            size = config.vocab_size
            raise Refusal(f"token_id(s) {outside} in prompt are out of vocabulary. Vocabulary size: {size}")
        raise invalid(f"Token id {max(outside)} is out of vocabulary", "prompt")
    if len(ids) >= config.max_model_len:
        if config.front_end is FrontEnd.RUST:
            text = f"this model's maximum context length is {config.max_model_len} tokens, but the prompt contains "
            raise Refusal(f"{text}{len(ids)} input tokens")
        text = f"This model's maximum context length is {config.max_model_len} tokens. However, your prompt contains "
        text += f"{len(ids)} input tokens, which exceeds this limit even without any output tokens. "
        raise invalid(text + "Please reduce the length of the input prompt.", "input_tokens", len(ids))
    return Prompt(tuple(ids), given if isinstance(given, str) else decode(ids, skip_special=False))


def read_max_tokens(config: SimulatorConfig, route: Route, prompts: tuple[Prompt, ...], asked: int | None) -> int:
    """What was asked for, or the route's default; refused where the context has no room for it."""
    if asked is not None and asked < 1:
        raise invalid(f"max_tokens must be at least 1, got {asked}.", "max_tokens", asked)
    room = config.max_model_len - max(len(p.ids) for p in prompts)
    if asked is None:
        return min(16, room) if route in (Route.COMPLETIONS, Route.GENERATE) else room
    if asked > room:
        text = f"This model's maximum context length is {config.max_model_len} tokens. However, you requested {asked} "
        text += f"output tokens and your prompt contains at least {config.max_model_len - room} input tokens."
        raise invalid(text, "max_tokens", asked)
    return asked


def read_sampling(params: dict[str, Any], max_tokens: int, logprobs: int | None, seed: int) -> Sampling:
    """`seed` is used where the request brings none; a value of the wrong type is the client's error."""
    try:
        return _sampling(params, max_tokens, logprobs, seed)
    except (TypeError, ValueError, AttributeError) as error:
        raise validation_error({"type": "value_error", "loc": "body", "msg": str(error)}) from error


def _sampling(params: dict[str, Any], max_tokens: int, logprobs: int | None, seed: int) -> Sampling:
    stop = params.get("stop") or ()
    bias = {int(i): float(b) for i, b in (params.get("logit_bias") or {}).items()}
    faults = params.get("vllm_xargs") or {}
    temperature = params.get("temperature")
    given = integer(params, "seed")
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if temperature is None else float(temperature),
        seed=seed if given is None else given,
        logprobs=logprobs or 0,
        extra_ids=tuple(params.get("logprob_token_ids") or ()),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_ids=frozenset(params.get("stop_token_ids") or ()),
        include_stop=params.get("include_stop_str_in_output") is True,
        skip_special=params.get("skip_special_tokens") is not False,
        ignore_eos=params.get("ignore_eos") is True,
        min_tokens=integer(params, "min_tokens") or 0,
        forced=tuple(i for i, b in bias.items() if b >= FORCING_BIAS),
        allowed=frozenset(params["allowed_token_ids"]) if params.get("allowed_token_ids") else None,
        banned=frozenset(i for i, b in bias.items() if b <= -FORCING_BIAS),
        nan_at=frozenset(faults.get("nan_at") or ()),
        missing_at=frozenset(faults.get("missing_at") or ()),
        floor_at=frozenset(faults.get("floor_at") or ()),
    )
