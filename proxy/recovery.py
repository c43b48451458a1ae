"""What to do after each attempt: the recovery ladder. The one place that decides it. Core.

    cause                        generation route
    OK, CLIENT_ERROR,            accept: the reply is the client's, whatever its status
      SERVER_ERROR
    NOT_COMPLIANT                repeat with a fresh cache_salt (``retries`` times), then stream, else give up
    UNREACHABLE, CLOSED_EARLY    repeat as it was (``connect_retries`` times): the engine did not answer yet
    CUT, TIMED_OUT, BAD_REPLY    give up: tokens may have been generated, and the reply is no reply
    STREAM_FAILED                give up: the ladder's last step broke

Control calls never come here: they are sent exactly once.
"""

from dataclasses import dataclass
from enum import Enum, auto

from proxy.errors import ErrorType

# What vLLM's JSONResponse raises for NaN; Python 3.12 adds ": nan".
_NOT_COMPLIANT = b"Out of range float values are not JSON compliant"


class Cause(Enum):
    """How an attempt ended."""

    OK = auto()
    NOT_COMPLIANT = auto()  # the server could not write a NaN
    CLIENT_ERROR = auto()
    SERVER_ERROR = auto()
    UNREACHABLE = auto()
    CLOSED_EARLY = auto()
    CUT = auto()
    TIMED_OUT = auto()
    BAD_REPLY = auto()
    STREAM_FAILED = auto()


@dataclass(frozen=True, slots=True)
class Policy:
    """``retries``: repeats with a fresh cache_salt. ``connect_retries``: repeats where the engine never answered."""

    retries: int = 1
    connect_retries: int = 2


@dataclass(frozen=True, slots=True)
class Attempts:
    """What has been tried for one request. ``streamable``: a stream can carry it."""

    salted: int = 0
    reconnected: int = 0
    streamable: bool = True


@dataclass(frozen=True, slots=True)
class Accept:
    """The reply goes to the client."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Send it again after ``delay`` seconds; with ``fresh_salt`` no cached prefix is used."""

    fresh_salt: bool
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Stream:
    """Send it as a stream and reassemble the reply."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Answer with this status and error type."""

    status: int
    type: ErrorType


Decision = Accept | Repeat | Stream | GiveUp


def decide(policy: Policy, tried: Attempts, cause: Cause) -> Decision:
    """The next step of the ladder."""
    match cause:
        case Cause.OK | Cause.CLIENT_ERROR | Cause.SERVER_ERROR:
            return Accept()
        case Cause.NOT_COMPLIANT if tried.salted < policy.retries:
            return Repeat(fresh_salt=True)
        case Cause.NOT_COMPLIANT if tried.streamable:
            return Stream()
        case Cause.NOT_COMPLIANT | Cause.STREAM_FAILED:
            return GiveUp(502, ErrorType.UNSCORABLE)
        case Cause.UNREACHABLE | Cause.CLOSED_EARLY if tried.reconnected < policy.connect_retries:
            return Repeat(fresh_salt=False, delay=_backoff(tried.reconnected))
        case Cause.UNREACHABLE | Cause.CLOSED_EARLY:
            return GiveUp(502, ErrorType.UNREACHABLE)
        case Cause.TIMED_OUT:
            return GiveUp(504, ErrorType.TIMEOUT)
        case Cause.CUT | Cause.BAD_REPLY:
            return GiveUp(502, ErrorType.PROTOCOL)


def classify(status: int, content_type: bytes, body: bytes, asks_logprobs: bool) -> Cause:
    """Cause of a complete reply. vLLM says 400 (500 in older versions); SGLang and others a plain-text 500."""
    if status < 400:
        return Cause.OK
    if status in (400, 500) and _NOT_COMPLIANT in body[:200]:
        return Cause.NOT_COMPLIANT
    if status == 500 and asks_logprobs and content_type.startswith(b"text/plain"):
        return Cause.NOT_COMPLIANT
    return Cause.CLIENT_ERROR if status < 500 else Cause.SERVER_ERROR


def _backoff(repeats: int) -> float:
    """0, 0.1, 0.2, 0.4, … at most 2 seconds."""
    return min(2.0, 0.1 * 2 ** (repeats - 1)) if repeats else 0.0
