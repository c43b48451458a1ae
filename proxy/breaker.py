"""Stops generation when unscorable replies are a pattern. A pure state machine: the clock is an argument. Core."""

from collections import deque
from dataclasses import dataclass
from enum import IntEnum


class State(IntEnum):
    """Value of the metric ``breaker_state``."""

    CLOSED = 0
    PROBING = 1
    OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """``ratio`` 0 turns the breaker off; ``window`` and ``probe_interval`` are seconds."""

    ratio: float = 0.5
    min_responses: int = 32
    window: float = 300.0
    probe_interval: float = 10.0


class Admission(IntEnum):
    """What becomes of a request."""

    REFUSED = 0
    PASSED = 1
    PROBE = 2


class Breaker:
    """Trips when enough of the last ``min_responses`` replies inside the window are bad; a clean probe closes it."""

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self.state = State.CLOSED
        self._replies: deque[tuple[float, bool]] = deque()
        self._bad = 0
        self._next_probe = 0.0

    def admit(self, now: float) -> Admission:
        """When open, one probe every ``probe_interval`` may pass."""
        if self.state is State.CLOSED:
            return Admission.PASSED
        if now < self._next_probe:
            return Admission.REFUSED
        self.state = State.PROBING
        self._next_probe = now + self.settings.probe_interval
        return Admission.PROBE

    def record(self, now: float, bad: bool, admission: Admission = Admission.PASSED) -> None:
        """A reply with sampled tokens: ``bad`` if it held a ``nan`` or ``floor`` token."""
        if self.settings.ratio <= 0:
            return
        if self.state is not State.CLOSED:
            if admission is Admission.PROBE:
                self._after_probe(bad)
            return
        self._replies.append((now, bad))
        self._bad += bad
        while len(self._replies) > self.settings.min_responses or self._replies[0][0] < now - self.settings.window:
            self._bad -= self._replies.popleft()[1]
        if len(self._replies) == self.settings.min_responses and self._bad >= self.settings.ratio * len(self._replies):
            self._trip(now)

    def retry_after(self, now: float) -> int:
        """Whole seconds until the next probe."""
        return max(1, round(self._next_probe - now + 0.5))

    def counts(self) -> tuple[int, int]:
        """(bad replies, replies) it looks at."""
        return self._bad, len(self._replies)

    def _after_probe(self, bad: bool) -> None:
        if bad:
            self.state = State.OPEN
            return
        self._replies.clear()
        self._bad = 0
        self.state = State.CLOSED

    def _trip(self, now: float) -> None:
        self.state = State.OPEN
        self._next_probe = now + self.settings.probe_interval
