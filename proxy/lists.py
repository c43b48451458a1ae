"""Logprobs of /v1/completions: parallel lists, one element a token. Core."""

from functools import cached_property

from proxy import jsonspan, marks
from proxy.alignment import aligned
from proxy.jsonbody import loads
from proxy.jsonspan import Span, elements, members
from proxy.ledger import Ledger
from proxy.unscorable import FLOOR, Reason, judge


def mark_lists(
    ledger: Ledger, logprobs: Span, inside: dict[bytes, Span], ids: list[int] | None, index: int
) -> dict[Reason, list[int]]:
    """Completions: parallel lists."""
    span = inside.get(b"token_logprobs")
    names = loads(ledger.text(inside[b"tokens"])) if ledger.opens(inside.get(b"tokens"), b"[") else None
    due = len(ids) if ids is not None else len(names) if names is not None else 0
    if span is None or not ledger.opens(span, b"["):
        reason = Reason.MISSING if span is None or ledger.text(span) == b"null" else Reason.MALFORMED
        if not due or not ledger.asked.logprobs:
            return {}
        row = marks.row(ledger.rules.encoding, due)
        ledger.edits.append(
            marks.insert_member(ledger.buf, logprobs, b'"token_logprobs":' + row) if span is None else (*span, row)
        )
        return ledger.all_of(reason, due, index)
    values, starts = jsonspan.tokens(ledger.buf, span)
    top = inside.get(b"top_logprobs")
    candidates = _Candidates(ledger, top if ledger.opens(top, b"[") else None)
    candidates.encode()
    if not aligned(ledger.asked, len(values), ids, names):
        due = due or len(values)
        ledger.edits.append((*span, marks.row(ledger.rules.encoding, due)))
        return ledger.all_of(Reason.MISALIGNED, due, index)
    return ledger.count(len(values), _judge(ledger, values, starts, candidates, index), index)


def _judge(
    ledger: Ledger, values: list[bytes], starts: list[int], candidates: "_Candidates", index: int
) -> dict[Reason, list[int]]:
    marked: dict[Reason, list[int]] = {}
    highest, code = ledger.rules.highest, ledger.rules.encoding.mark
    for i, token in enumerate(values):
        try:
            if FLOOR < float(token) <= highest:
                continue
        except ValueError:
            pass
        known = token == b"null" and candidates.at(i)
        if ledger.asked.echo and i == 0 and not ledger.before.get(index) and token == b"null" and not known:
            continue  # the first prompt token: nothing stands before it
        reason = judge(token, ledger.rules, known)
        if reason is not None:
            marked.setdefault(reason, []).append(i)
            ledger.edits.append((starts[i], starts[i] + len(token), code))
    return marked


class _Candidates:
    """``top_logprobs``: one object of candidates a position; walked only where something hangs on it."""

    def __init__(self, ledger: Ledger, span: Span | None) -> None:
        self._ledger = ledger
        self._span = span

    @cached_property
    def _spans(self) -> list[Span]:
        return list(elements(self._ledger.buf, self._span[0])) if self._span else []

    def at(self, position: int) -> bool:
        """The engine had candidates at this position, so it computed something there."""
        return position < len(self._spans) and self._ledger.text(self._spans[position]) not in (b"null", b"{}")

    def encode(self) -> None:
        """Candidates that are no numbers are written in the client's encoding."""
        if self._span is None or not self._ledger.may_hold_non_numbers(self._span):
            return
        for span in self._spans:
            if self._ledger.opens(span, b"{"):
                self._ledger.candidates(value for _, value in members(self._ledger.buf, span[0]))
