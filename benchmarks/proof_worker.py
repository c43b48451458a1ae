"""The rollout worker of a proof: TRL's own, observed from inside its spawned process. Runs in TRL's environment.

Overrides nothing but two methods, which call TRL's and note when: what a rollout met on HTTP, and whether it came back.
"""

import contextvars
import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import proof_notes
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

_rollout: contextvars.ContextVar[int] = contextvars.ContextVar("rollout")


def reward_variety(completions: list[Any], **_: Any) -> list[float]:
    """How many different characters: any reward will do, as long as it differs within a group."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]


class ObservedLoop(_AsyncRolloutLoop):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._serial = itertools.count()
        self._notes = os.open(os.environ[proof_notes.FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def _note(self, event: str) -> None:
        os.write(self._notes, f"{json.dumps([time.time(), _rollout.get(), event])}\n".encode())

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        _rollout.set(next(self._serial))  # each rollout is a task: the value is its own
        reply = await super()._generate_one_turn(prompt_ids)
        self._note("delivered")
        return reply

    async def _retry(self, coro_factory: Callable[[], Awaitable[Any]], *, label: str, max_attempts: int = 1) -> Any:
        if not label.startswith("POST"):  # the outer of the two loops, around the one that sends
            return await super()._retry(coro_factory, label=label, max_attempts=max_attempts)

        async def attempt() -> Any:
            self._note("attempt")
            try:
                return await coro_factory()
            except aiohttp.ClientResponseError as error:
                self._note(str(error.status))
                raise
            except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
                self._note(type(error).__name__)
                raise

        return await super()._retry(attempt, label=label, max_attempts=max_attempts)


class ObservedWorker(AsyncRolloutWorker):
    _loop_cls = ObservedLoop
