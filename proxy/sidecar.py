"""The state of one running sidecar: what its requests share. Shell; no globals."""

import time
from dataclasses import dataclass, field

from proxy.breaker import Breaker
from proxy.incidents import Incidents
from proxy.metrics import Metrics
from proxy.recovery import Policy
from proxy.settings import Settings
from proxy.upstream import Upstream


@dataclass(slots=True)
class Sidecar:
    """Made by ``create_app``; ``draining`` once SIGTERM has come."""

    settings: Settings
    upstream: Upstream
    breaker: Breaker
    incidents: Incidents
    policy: Policy
    metrics: Metrics = field(default_factory=Metrics)
    started: float = field(default_factory=time.time)
    inflight: int = 0
    generations: int = 0
    draining: bool = False
