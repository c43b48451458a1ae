"""What one walk over one reply has found and will change; and how it reads the bytes under it. Core."""

import re
from collections.abc import Iterable
from typing import TypeGuard

from proxy.api import Api, Asked
from proxy.jsonbody import loads
from proxy.jsonspan import Span
from proxy.unscorable import Encoding, Findings, Reason, Rules, breaks_candidate

# null, NaN, Infinity, or an exponent that may overflow a double.
_NON_NUMBER = re.compile(rb"null|NaN|Infinity|[eE]\+?\d{3}")


class Ledger:
    """``edits`` to splice into ``buf``, ``findings``, and ``before``: positions each choice has had so far."""

    def __init__(self, buf: bytes, asked: Asked, rules: Rules, before: dict[int, int]) -> None:
        self.buf = buf
        self.asked = asked
        self.rules = rules
        self.before = before
        self.edits: list[tuple[int, int, bytes]] = []
        self.findings = Findings()

    @property
    def style(self) -> tuple[Api, Encoding]:
        return self.asked.api, self.rules.encoding

    def candidates(self, values: Iterable[Span]) -> None:
        code = self.rules.encoding.candidate
        for value in values:
            token = self.text(value)
            if token != code and breaks_candidate(token):
                self.edits.append((*value, code))

    def note(self, index: int, marked: dict[Reason, list[int]]) -> None:
        if not marked:
            return
        choice = self.findings.marked.setdefault(index, {})
        for reason, positions in marked.items():
            choice.setdefault(reason, []).extend(positions)

    def all_of(self, reason: Reason, due: int, index: int) -> dict[Reason, list[int]]:
        """Every one of ``due`` positions is unscorable."""
        return self.count(due, {reason: list(range(due))}, index)

    def count(self, due: int, marked: dict[Reason, list[int]], index: int) -> dict[Reason, list[int]]:
        self.findings.sampled += due
        self.before[index] = self.before.get(index, 0) + due
        return marked

    def ids(self, span: Span | None) -> list[int] | None:
        if not self.opens(span, b"["):
            return None
        ids = loads(self.text(span))
        return ids if all(type(token_id) is int for token_id in ids) else None

    def may_hold_non_numbers(self, span: Span) -> bool:
        return _NON_NUMBER.search(self.buf, *span) is not None

    def opens(self, span: Span | None, bracket: bytes) -> TypeGuard[Span]:
        return span is not None and self.buf[span[0] : span[0] + 1] == bracket

    def text(self, span: Span) -> bytes:
        return self.buf[span[0] : span[1]]
