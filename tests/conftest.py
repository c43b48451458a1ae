"""Fixtures that more than one test file uses: the real vLLM servers, booted when first asked for and reused."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import vllm_env
from hypothesis import HealthCheck, settings
from servers import run_sidecar

if os.environ.get("WITHOUT_WALK"):
    sys.modules["proxy.walk"] = None  # type: ignore[assignment]  # importing it fails, as where it was not compiled

# How long an example takes says how busy the machine is; speed is what benchmarks are for.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True, slots=True)
class VllmPair:
    """vLLM's two front ends over the same model."""

    python: vllm_env.VllmServer
    rust: vllm_env.VllmServer


class VllmFleet:
    """Keeps one pair of servers alive: two engines are what a machine with two cores serves without slowing down."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._poisoned: bool | None = None
        self._pair: VllmPair | None = None

    def pair(self, *, poisoned: bool) -> VllmPair:
        if self._pair is None or self._poisoned != poisoned:
            self.close()
            model = vllm_env.ensure_model(poisoned=poisoned)
            servers = (vllm_env.run_vllm(model), vllm_env.run_vllm(model, front_end="rust"))
            with ThreadPoolExecutor() as pool:  # most of a boot is imports on one core
                self._pair = VllmPair(*pool.map(self._running.enter_context, servers))
            self._poisoned = poisoned
        return self._pair

    def close(self) -> None:
        self._pair = None
        self._running.close()


@pytest.fixture(scope="session")
def vllm_fleet() -> Iterator[VllmFleet]:
    fleet = VllmFleet()
    yield fleet
    fleet.close()


@pytest.fixture
def vllm_poison(vllm_fleet: VllmFleet) -> VllmPair:
    """Both servers over the model that turns to NaN after any id of vllm_env.POISONED_IDS."""
    return vllm_fleet.pair(poisoned=True)


@pytest.fixture
def vllm_clean(vllm_fleet: VllmFleet) -> VllmPair:
    """Both servers over the model that never yields NaN."""
    return vllm_fleet.pair(poisoned=False)


@dataclass(frozen=True, slots=True)
class Served:
    """A sidecar and the vLLM behind it, by URL; `front_end` is "python" or "rust"."""

    front_end: str
    vllm: str
    sidecar: str


@pytest.fixture(scope="module", params=["python", "rust"])
def poisoned(request: pytest.FixtureRequest, vllm_fleet: VllmFleet) -> Iterator[Served]:
    yield from _served(request.param, vllm_fleet.pair(poisoned=True))


@pytest.fixture(scope="module", params=["python", "rust"])
def clean(request: pytest.FixtureRequest, vllm_fleet: VllmFleet) -> Iterator[Served]:
    yield from _served(request.param, vllm_fleet.pair(poisoned=False))


def _served(front_end: str, pair: VllmPair) -> Iterator[Served]:
    vllm: str = getattr(pair, front_end).url
    # The breaker stays closed: most replies are bad here, which is what it is there to stop.
    with run_sidecar(vllm, trip_ratio=0) as sidecar:
        yield Served(front_end, vllm, sidecar)
