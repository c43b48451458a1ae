"""What a rollout worker met on HTTP, read from the notes that proof_worker takes. Standard library only."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

FILE = "PROOF_NOTES"
"""The variable that names the file to which the worker's process appends [time, rollout, event]."""


@dataclass(frozen=True)
class Traffic:
    """`lost`: rollouts of which a reply failed, and which had not come back when the run ended."""

    attempts: int
    delivered: int
    lost: int
    failures: dict[str, int] = field(default_factory=dict)
    """By status code, or by the name of the error where there was no status."""

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


def read(path: Path) -> Traffic:
    notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    events = Counter(event for _, _, event in notes)
    delivered = {rollout for _, rollout, event in notes if event == "delivered"}
    failures = {event: n for event, n in sorted(events.items()) if event not in ("attempt", "delivered")}
    failed = {rollout for _, rollout, event in notes if event in failures}
    return Traffic(
        attempts=events["attempt"],
        delivered=len(delivered),
        lost=len(failed - delivered),
        failures=failures,
    )
