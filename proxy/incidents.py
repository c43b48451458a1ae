"""What happened to single requests, newest first, bounded: for /sidecar/incidents. Core; the time is an argument."""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from proxy.unscorable import Findings

# Positions kept per choice and reason: a runaway reply would fill the page.
_MOST_POSITIONS = 64


@dataclass(frozen=True, slots=True)
class Incident:
    """``time``: Unix seconds. ``reasons``: counts. ``positions``: choice -> reason -> the first positions.

    ``action``: marked, rejected, recovered by retry or stream, or failed; ``detail``: in words.
    """

    time: float
    route: str
    request_id: str
    action: str
    detail: str
    reasons: dict[str, int]
    positions: dict[int, dict[str, list[int]]]


class Incidents:
    """The last ``size`` incidents."""

    def __init__(self, size: int) -> None:
        self._kept: deque[Incident] = deque(maxlen=size)
        self.total = 0

    def add(self, incident: Incident) -> None:
        self._kept.appendleft(incident)
        self.total += 1

    def newest(self) -> list[dict[str, Any]]:
        return [asdict(incident) for incident in self._kept]


def describe(findings: Findings) -> tuple[dict[str, int], dict[int, dict[str, list[int]]]]:
    """(reasons, positions) of an incident."""
    positions = {
        choice: {reason.value: at[:_MOST_POSITIONS] for reason, at in reasons.items()}
        for choice, reasons in findings.marked.items()
    }
    return {reason.value: count for reason, count in findings.by_reason().items()}, positions
