"""Logprobs of chat, responses and /inference/v1/generate: one object a token. Core."""

from collections.abc import Iterable

from proxy import marks
from proxy.alignment import aligned
from proxy.jsonspan import Span, elements, members
from proxy.ledger import Ledger
from proxy.unscorable import Reason, judge


def mark_content(ledger: Ledger, span: Span, ids: list[int] | None, index: int) -> dict[Reason, list[int]]:
    """Chat and generate: one object a token."""
    if not ledger.opens(span, b"["):
        if not ids or not ledger.asked.logprobs:
            return {}
        ledger.edits.append((*span, b"[" + marks.entries(*ledger.style, ids) + b"]"))
        return ledger.all_of(Reason.MISSING, len(ids), index)
    return mark_entries(ledger, span, ids, index)


def mark_entries(ledger: Ledger, span: Span, ids: list[int] | None, index: int) -> dict[Reason, list[int]]:
    """Positions to mark; a list that is too long or short gets one marked entry for each token id."""
    spans = list(elements(ledger.buf, span[0]))
    entries = [dict(members(ledger.buf, entry[0])) if ledger.opens(entry, b"{") else {} for entry in spans]
    fits = aligned(ledger.asked, len(entries), ids, [_name(ledger, entry) for entry in entries])
    marked: dict[Reason, list[int]] = {}
    for i, (at, entry) in enumerate(zip(spans, entries, strict=True)):
        if ids and i >= len(ids):
            break
        reason = _judge_entry(ledger, at, entry, fits)
        if reason is not None:
            marked.setdefault(reason, []).append(i)
    if ids and len(ids) != len(entries):
        _resize(ledger, span, spans, ids)
        return ledger.all_of(Reason.MISALIGNED, len(ids), index)
    return ledger.count(len(entries), marked, index)


def _judge_entry(ledger: Ledger, at: Span, entry: dict[bytes, Span], aligned: bool) -> Reason | None:
    code = ledger.rules.encoding.mark
    if b"top_logprobs" in entry and ledger.may_hold_non_numbers(entry[b"top_logprobs"]):
        ledger.candidates(_candidate_entries(ledger, entry[b"top_logprobs"]))
    if not entry:
        ledger.edits.append((*at, marks.entry(*ledger.style, None)))
        return Reason.MISALIGNED if not aligned else Reason.MISSING
    value = entry.get(b"logprob")
    reason = Reason.MISSING if value is None else judge(ledger.text(value), ledger.rules, True)
    if not aligned:
        reason = Reason.MISALIGNED
    if reason is not None:
        ledger.edits.append(
            marks.insert_member(ledger.buf, at, b'"logprob":' + code) if value is None else (*value, code)
        )
    return reason


def _candidate_entries(ledger: Ledger, span: Span) -> Iterable[Span]:
    if ledger.opens(span, b"["):
        for entry in elements(ledger.buf, span[0]):
            if ledger.opens(entry, b"{"):
                yield from (value for key, value in members(ledger.buf, entry[0]) if key == b"logprob")


def _resize(ledger: Ledger, span: Span, spans: list[Span], ids: list[int]) -> None:
    """One entry a token id: what is too much goes, what lacks comes as a marked entry."""
    if len(spans) > len(ids):
        ledger.edits.append((spans[len(ids) - 1][1], span[1] - 1, b""))
        return
    new = marks.entries(*ledger.style, ids[len(spans) :])
    ledger.edits.append((span[1] - 1, span[1] - 1, b"," + new if spans else new))


def _name(ledger: Ledger, entry: dict[bytes, Span]) -> str | None:
    if b"token_id" in entry:
        return "token_id:" + ledger.text(entry[b"token_id"]).decode()
    token = ledger.text(entry[b"token"]) if b"token" in entry else b""
    return token[1:-1].decode() if token.startswith(b'"token_id:') else None
