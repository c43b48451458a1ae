"""What makes a logprob unscorable, and how it is written. The one place that decides it. Core."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from proxy.jsonbody import InvalidJson

# vLLM clamps -inf to -9999.0 before it writes JSON, and its Rust front end writes NaN so as well.
FLOOR = -9999.0
# Rounding may lift the logprob of a certain token a little over 0; no probability exceeds 1 by more.
TOLERANCE = 1e-3


class Reason(StrEnum):
    """Why a sampled token's behaviour-policy logprob is no usable number: the contract's closed set."""

    NAN = "nan"
    MISSING = "missing"
    INFINITE = "infinite"
    FLOOR = "floor"
    POSITIVE = "positive"
    MISALIGNED = "misaligned"
    MALFORMED = "malformed"


class Encoding(StrEnum):
    """How an unscorable sampled position is written (``nan_encoding``)."""

    CEILING = "ceiling"
    LITERAL = "literal"
    STRING = "string"
    NULL = "null"

    @property
    def mark(self) -> bytes:
        """JSON token at an unscorable sampled position."""
        return _MARKS[self]

    @property
    def candidate(self) -> bytes:
        """JSON token for a candidate that is no number: a candidate is no ratio, so the ceiling does not fit it."""
        return b"null" if self is Encoding.CEILING else _MARKS[self]


_MARKS = {
    Encoding.CEILING: b"9999.0",
    Encoding.LITERAL: b"NaN",
    Encoding.STRING: b'"NaN"',
    Encoding.NULL: b"null",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that judging and writing depend on."""

    encoding: Encoding = Encoding.CEILING
    allow_positive: bool = False

    @property
    def highest(self) -> float:
        return math.inf if self.allow_positive else TOLERANCE


@dataclass(slots=True)
class Findings:
    """What one reply, or one event of a stream, held.

    ``sampled``: positions judged. ``marked``: choice -> reason -> positions, counted over that object's own list.
    ``unmarkable``: choices whose logprobs were asked for and are gone, with no token ids to say how many.
    """

    sampled: int = 0
    marked: dict[int, dict[Reason, list[int]]] = field(default_factory=dict)
    unmarkable: int = 0

    @property
    def unscorable(self) -> int:
        return sum(len(positions) for reasons in self.marked.values() for positions in reasons.values())

    def by_reason(self) -> dict[Reason, int]:
        counts: dict[Reason, int] = {}
        for reasons in self.marked.values():
            for reason, positions in reasons.items():
                counts[reason] = counts.get(reason, 0) + len(positions)
        return counts


def judge(token: bytes, rules: Rules, has_candidates: bool) -> Reason | None:
    """Reason why the JSON value ``token`` at a sampled position is unscorable, None if it is a usable logprob."""
    if token == b"null":
        return Reason.NAN if has_candidates else Reason.MISSING
    if token[:1] in (b'"', b"t", b"f", b"{", b"["):
        return Reason.MALFORMED
    try:
        value = float(token)
    except ValueError:
        raise InvalidJson(f"{token[:40]!r} is no JSON value") from None
    if math.isnan(value):
        return Reason.NAN
    if math.isinf(value):
        return Reason.INFINITE
    if value <= FLOOR:
        return Reason.FLOOR
    return Reason.POSITIVE if value > rules.highest else None


def breaks_candidate(token: bytes) -> bool:
    """True for null and non-finite numbers among the candidates."""
    try:
        return not math.isfinite(float(token))
    except ValueError:
        return token == b"null"
