"""The simulated engine as others see it: who runs, who waits, pause and resume, aborts, counters. Knows no HTTP."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from proxy.simulator.config import SimulatorConfig
from proxy.simulator.engine import Choice

_UNSEEN = object()


@dataclass(eq=False, slots=True)
class Run:
    """One admitted request."""

    choices: Sequence[Choice]
    aborted: bool = False

    @property
    def unfinished(self) -> int:
        return sum(choice.finish_reason is None for choice in self.choices)


class Engine:
    def __init__(self, config: SimulatorConfig) -> None:
        self.config = config
        self.paused = False  # nothing new is admitted
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.waiting = 0
        self._frozen = False  # nothing running advances
        self._running: set[Run] = set()
        self._bell = asyncio.Event()
        self._stale_blocks = config.stale_block
        self._bad_salt: object = _UNSEEN
        self._prefix_cached = bool(config.poisoned_prefix)

    @property
    def running(self) -> int:
        """Sequences, as vLLM counts them: n samples are n."""
        return sum(run.unfinished for run in self._running)

    async def steps(self, choices: Sequence[Choice]) -> AsyncGenerator[Sequence[Choice], None]:
        """Advances every unfinished choice by one token at a time; close it, or cancel its task, to abort."""
        run = Run(choices)
        await self._admit(len(choices))
        self._running.add(run)
        self._ring()
        try:
            self.prompt_tokens += sum(len(c.prompt.ids) for c in choices if c.sample == 0)
            while current := [choice for choice in choices if choice.finish_reason is None]:
                await asyncio.sleep(self.config.latency_per_token)
                while self._frozen and not run.aborted:
                    await self._bell.wait()
                for choice in current:
                    if run.aborted:
                        choice.finish_reason = "abort"
                    else:
                        choice.advance()
                self.generation_tokens += len(current) * (not run.aborted)
                yield current
        finally:
            self._running.discard(run)
            self.finished.update(choice.finish_reason or "abort" for choice in choices)
            self._ring()

    async def pause(self, mode: str) -> None:
        """`keep` freezes what runs, `abort` ends it with what it has, `wait` returns when it has ended by itself."""
        self.paused = True
        self._frozen = mode == "keep"
        if mode == "abort":
            self.abort_all()
        while mode != "keep" and self._running:
            await self._bell.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on what runs or waits; for tests, instead of sleeping."""
        while not condition():
            await self._bell.wait()

    def resume(self) -> None:
        self.paused = self._frozen = False
        self._ring()

    def abort_all(self) -> int:
        for run in self._running:
            run.aborted = True
        self._ring()
        return len(self._running)

    def contaminated(self, prompt: Sequence[int], cache_salt: str | None) -> bool:
        """Whether this request reads NaN that another left; asked once a request, because a stale block heals."""
        prefix = self.config.poisoned_prefix
        if self._prefix_cached and tuple(prompt[: len(prefix)]) == prefix:
            if self._bad_salt is _UNSEEN:
                self._bad_salt = cache_salt
            if cache_salt == self._bad_salt:
                return True
        if self._stale_blocks:
            self._stale_blocks -= 1
            return True
        return False

    def reset_prefix_cache(self) -> None:
        self._prefix_cached = False

    def metrics(self) -> str:
        """The few of vLLM's own metrics that a client of the stand-in may read."""
        labels = f'engine="0",model_name="{self.config.model}"'
        lines = []
        for kind, name, value in (
            ("gauge", "vllm:num_requests_running", self.running),
            ("gauge", "vllm:num_requests_waiting", self.waiting),
            ("counter", "vllm:prompt_tokens_total", self.prompt_tokens),
            ("counter", "vllm:generation_tokens_total", self.generation_tokens),
        ):
            lines += [f"# TYPE {name} {kind}", f"{name}{{{labels}}} {float(value)}"]
        lines.append("# TYPE vllm:request_success_total counter")
        for reason in ("stop", "length", "abort", "error"):
            name = f'vllm:request_success_total{{{labels},finished_reason="{reason}"}}'
            lines.append(f"{name} {float(self.finished[reason])}")
        return "\n".join(lines) + "\n"

    async def _admit(self, sequences: int) -> None:
        self.waiting += sequences
        self._ring()
        try:
            while self.paused:
                await self._bell.wait()
        finally:
            self.waiting -= sequences

    def _ring(self) -> None:
        self._bell.set()
        self._bell = asyncio.Event()
