"""``logprob-sidecar doctor``: is this vLLM fit for RL rollouts? Asks it a few cheap things. Shell."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.console import Console
from rich.table import Table

from proxy import quick
from proxy.api import Api, read_request
from proxy.errors import BadReply
from proxy.jsonbody import dumps
from proxy.recovery import Cause, classify
from proxy.rewrite import rewrite_reply
from proxy.settings import http_url
from proxy.unscorable import Rules

HELP = "Ask a vLLM whether it is fit for RL rollouts; changes nothing there."
_PROMPT = [10, 11, 12]


class DoctorSettings(BaseSettings):
    """Frozen; unknown fields are refused."""

    model_config = SettingsConfigDict(env_prefix="SIDECAR_", frozen=True, extra="ignore")

    upstream: Annotated[str, AfterValidator(http_url)] = Field(description="URL of vLLM")
    timeout: float = Field(60.0, gt=0, description="seconds each question may take")


@dataclass(frozen=True, slots=True)
class Check:
    """``verdict``: ok, note (works, but know this) or bad."""

    name: str
    verdict: str
    detail: str


def doctor(settings: DoctorSettings) -> int:
    """Prints the checks; 0 if none is bad."""
    with httpx.Client(base_url=settings.upstream, timeout=settings.timeout, trust_env=False) as client:
        checks = [_build()]
        try:
            checks.extend(examine(client))
        except httpx.HTTPError as error:
            checks.append(Check("reachable", "bad", f"{settings.upstream}: {error}"))
    table = Table(title=f"{settings.upstream} for RL rollouts", title_justify="left")
    for heading in ("check", "verdict", "what was found"):
        table.add_column(heading)
    for check in checks:
        table.add_row(
            check.name, {"ok": "[green]ok", "note": "[yellow]note", "bad": "[red]bad"}[check.verdict], check.detail
        )
    Console().print(table)
    return int(any(check.verdict == "bad" for check in checks))


def _build() -> Check:
    if quick.survey is not None:
        return Check("sidecar", "ok", "replies are looked through by compiled code")
    slow = "replies are looked through in Python, eight times as slowly: install again where there is a C compiler"
    return Check("sidecar", "note", slow)


def examine(client: httpx.Client) -> Iterator[Check]:
    """The checks, in order; raises httpx.HTTPError where nothing answers."""
    health = client.get("/health")
    yield Check("health", "ok" if health.status_code == 200 else "bad", f"/health answers {health.status_code}")
    version = client.get("/version")
    known = version.json() if version.status_code == 200 else {}
    if "rust_frontend_version" in known:
        yield Check(
            "server", "note", f"vLLM {known.get('version')}, Rust front end: NaN arrives as -9999.0 with HTTP 200"
        )
    else:
        yield Check(
            "server", "ok", f"vLLM {known.get('version', '(says no version)')}, Python server: NaN becomes HTTP 400"
        )
    models = client.get("/v1/models").json().get("data", [])
    if not models:
        yield Check("model", "bad", "/v1/models lists none")
        return
    yield Check("model", "ok", f"{models[0]['id']}, {models[0].get('max_model_len', '?')} tokens")
    yield from _rollout(client, models[0]["id"])
    paused = client.get("/is_paused")
    if paused.status_code == 200:
        yield Check("weight updates", "ok", "/pause, /resume and the weight endpoints are open")
    else:
        yield Check("weight updates", "note", "closed; asynchronous trainers need VLLM_SERVER_DEV_MODE=1")


def _rollout(client: httpx.Client, model: str) -> Iterator[Check]:
    request: dict[str, Any] = {"model": model, "prompt": _PROMPT, "max_tokens": 8, "logprobs": 0, "seed": 1}
    request |= {"return_token_ids": True}
    reply = client.post(Api.COMPLETIONS.value, json=request)
    kind = reply.headers.get("content-type", "").encode()
    cause = classify(reply.status_code, kind, reply.content, asks_logprobs=True)
    if cause is Cause.NOT_COMPLIANT:
        yield Check("logprobs", "bad", "NaN for a plain prompt: wrong kernels, a poisoned cache or collapsed weights")
        return
    if cause is not Cause.OK:
        yield Check("logprobs", "bad", f"HTTP {reply.status_code}: {reply.text[:200]}")
        return
    asked = read_request(Api.COMPLETIONS, dumps(request))
    try:
        _, findings = rewrite_reply(reply.content, Api.COMPLETIONS, Rules(), lambda: asked)
    except BadReply as error:
        yield Check("logprobs", "bad", str(error))
        return
    reasons = {reason.value: count for reason, count in findings.by_reason().items()}
    if "positive" in reasons:
        yield Check("logprobs", "bad", "values over 0: --logprobs-mode raw_logits? serve needs --allow-positive")
    elif reasons or findings.unmarkable or not findings.sampled:
        yield Check("logprobs", "bad", f"{findings.sampled} sampled tokens, unscorable: {reasons}")
    else:
        yield Check("logprobs", "ok", f"{findings.sampled} sampled tokens, all usable")
    choice = reply.json()["choices"][0]
    with_ids = isinstance(choice.get("token_ids"), list)
    detail = "return_token_ids works" if with_ids else "no token_ids in the reply: alignment cannot be checked"
    yield Check("token ids", "ok" if with_ids else "bad", detail)
    again = client.post(Api.COMPLETIONS.value, json=request)
    same = again.status_code == 200 and again.json()["choices"][0].get("token_ids") == choice.get("token_ids")
    yield Check("seeds", "ok" if same else "note", "a seed repeats its tokens" if same else "a seed gives other tokens")
    several = client.post(Api.COMPLETIONS.value, json=request | {"n": 2, "max_tokens": 1})
    works = several.status_code == 200
    yield Check("n > 1", "ok" if works else "note", "works" if works else "refused: ask once per sample")
