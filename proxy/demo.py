"""``logprob-sidecar demo``: the same requests to a failing engine, without and with the sidecar. Shell.

Simulator and sidecar run in this process, on free loopback ports, as real servers.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import httpx
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table

from proxy.app import create_app
from proxy.embedded import run_app
from proxy.settings import Settings
from proxy.simulator import SimulatorConfig, create_simulator

HELP = "Show what the sidecar does, on this machine alone: no GPU, no model, no vLLM."


class DemoSettings(BaseSettings):
    """Frozen; unknown fields are refused."""

    model_config = SettingsConfigDict(env_prefix="DEMO_", frozen=True, extra="forbid")

    requests: int = Field(300, ge=1, le=100_000, description="completions to ask for, each way")
    nan_rate: float = Field(0.02, ge=0, le=1, description="share of sampled tokens whose logprob is NaN")
    missing_rate: float = Field(0.002, ge=0, le=1, description="share of sampled tokens without logprobs")
    max_tokens: int = Field(16, ge=1, le=4096, description="tokens of each completion")
    concurrency: int = Field(32, ge=1, le=1024, description="requests in flight")


@dataclass(slots=True)
class Outcome:
    """What one way of asking brought."""

    replies: int = 0
    lost: int = 0
    tokens: int = 0
    poisonous: int = 0  # logprobs a trainer would take for numbers, or choke on
    recovered: Counter[str] = field(default_factory=Counter)
    marked: Counter[str] = field(default_factory=Counter)
    example: tuple[int, int, str] | None = None  # request, status, body


def demo(settings: DemoSettings) -> int:
    """Runs the demo; 0 if every rollout came back through the sidecar."""
    return asyncio.run(_demo(settings, Console()))


async def _demo(settings: DemoSettings, console: Console) -> int:
    config = SimulatorConfig(nan_rate=settings.nan_rate, missing_rate=settings.missing_rate)
    async with run_app(create_simulator(config)) as engine:
        sidecar = create_app(Settings(upstream=engine, trip_ratio=0))
        async with run_app(sidecar, server_header=False, date_header=False) as url:
            console.print(f"simulated vLLM on {engine}, sidecar on {url}\n")
            direct = await _ask_all(console, settings, engine, "without the sidecar")
            through = await _ask_all(console, settings, url, "with the sidecar   ")
            if direct.example is not None:
                await _show_example(console, settings, url, direct.example)
            console.print(_table(settings, direct, through))
            trained = await _train(console, url)
    return 1 if through.lost or through.poisonous or not trained else 0


async def _train(console: Console, url: str) -> bool:
    """A small training run in a process of its own: the sidecar needs no torch, and the hook knows no sidecar."""
    if find_spec("torch") is None:
        console.print("\nWith the extra `trainer` (torch) installed, a small training run follows here.")
        return True
    with console.status("training on the same rollouts, three ways"):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "ignore", "-m", "trainer_hooks.demo", url), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
    table = Table("trainer", "after it", title="A small training run", title_justify="left")
    for line in out.decode().splitlines():
        table.add_row(*line.split("\t"))
    console.print(table)
    return process.returncode == 0


async def _ask_all(console: Console, settings: DemoSettings, url: str, label: str) -> Outcome:
    outcome = Outcome()
    gate = asyncio.Semaphore(settings.concurrency)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Environment proxies would not reach this process's own ports.
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(label, total=settings.requests)

            async def one(number: int) -> None:
                async with gate:
                    reply = await client.post("/v1/completions", json=_request(settings, number))
                _take(outcome, number, reply)
                progress.advance(task)

            await _gather(settings.requests, one)
    return outcome


async def _gather(count: int, one: Callable[[int], Awaitable[None]]) -> None:
    await asyncio.gather(*(one(number) for number in range(count)))


def _request(settings: DemoSettings, number: int) -> dict[str, Any]:
    """What a rollout worker asks: token ids in, one logprob for each sampled token out."""
    prompt = [10 + number % 200, 11, 12]
    return {
        "prompt": prompt,
        "max_tokens": settings.max_tokens,
        "logprobs": 0,
        "seed": number,
        "return_token_ids": True,
    }


def _take(outcome: Outcome, number: int, reply: httpx.Response) -> None:
    if reply.status_code != 200:
        outcome.lost += 1
        if outcome.example is None and reply.status_code == 400:
            outcome.example = (number, reply.status_code, reply.text)
        return
    outcome.replies += 1
    if recovery := reply.headers.get("x-sidecar-recovery"):
        outcome.recovered[recovery] += 1
    for choice in reply.json()["choices"]:
        logprobs = choice["logprobs"]
        outcome.tokens += len(logprobs["token_logprobs"])
        outcome.poisonous += sum(value is None or value <= -9999.0 for value in logprobs["token_logprobs"])
        for reason, positions in logprobs.get("unscorable", {}).items():
            outcome.marked[reason] += len(positions)


async def _show_example(console: Console, settings: DemoSettings, url: str, example: tuple[int, int, str]) -> None:
    number, status, before = example
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        reply = await client.post("/v1/completions", json=_request(settings, number))
    console.print(_panel(f"vLLM's reply to request {number}: HTTP {status}", before))
    shown = reply.json()["choices"][0]
    logprobs = {key: shown["logprobs"][key] for key in ("token_logprobs", "unscorable")}
    excerpt = json.dumps({"choices": [{"logprobs": logprobs, "token_ids": shown["token_ids"]}]})
    console.print(_panel(f"the same through the sidecar: HTTP {reply.status_code}", excerpt))
    for name in ("X-Unscorable-Tokens", "X-Sidecar-Recovery"):
        console.print(f"{name}: {reply.headers.get(name)}")
    console.print()


def _panel(title: str, body: str) -> Panel:
    return Panel(Syntax(body, "json", word_wrap=True, background_color="default"), title=title, title_align="left")


def _table(settings: DemoSettings, direct: Outcome, through: Outcome) -> Table:
    table = Table(title="What a trainer gets", title_justify="left")
    for heading in ("", "without the sidecar", "with the sidecar"):
        table.add_column(heading, justify="left" if not heading else "right")
    marked = ", ".join(f"{count} {reason}" for reason, count in sorted(through.marked.items())) or "0"
    recovered = ", ".join(f"{count} by {action}" for action, count in sorted(through.recovered.items())) or "0"
    rows = [
        ("rollouts asked for", settings.requests, settings.requests),
        ("rollouts lost (HTTP 400)", direct.lost, through.lost),
        ("rollouts recovered", "-", recovered),
        ("sampled tokens delivered", direct.tokens, through.tokens),
        ("null or -9999.0 passed off as a logprob", direct.poisonous, through.poisonous),
        ("tokens marked unscorable", "-", marked),
    ]
    for row in rows:
        table.add_row(*map(str, row))
    return table
