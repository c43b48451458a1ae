"""Finds the logprobs in one JSON reply or event and splices marks in. Core.

Works on spans of the bytes that came: what is not marked leaves as it was written. Here is decided where logprobs lie
and what becomes of a choice that has none; ``lists`` and ``entries`` go through them, ``alignment`` counts them,
``unscorable`` judges one value.
"""

from proxy import jsonspan, marks
from proxy.api import Api, Asked
from proxy.entries import mark_content, mark_entries
from proxy.jsonbody import InvalidJson
from proxy.jsonspan import Span, elements, members
from proxy.ledger import Ledger
from proxy.lists import mark_lists
from proxy.unscorable import Findings, Reason, Rules

# Objects of /v1/responses that hold lists of logprobs somewhere below them.
_RESPONSES_PATH = frozenset((b"response", b"output", b"item", b"part", b"content"))


def mark(body: bytes, asked: Asked, rules: Rules, before: dict[int, int] | None = None) -> tuple[bytes, Findings]:
    """Reply or event with its unscorable positions marked, and what was found.

    ``before``: positions each choice has had in earlier events of the same stream; updated here.
    With nothing to mark the very object ``body`` comes back. Raises InvalidJson.
    """
    ledger = Ledger(body, asked, rules, {} if before is None else before)
    start = jsonspan.after_space(body, 0)
    if body[start : start + 1] != b"{":
        raise InvalidJson("the reply is no JSON object")
    end = jsonspan.skip(body, start)
    if jsonspan.after_space(body, end) != len(body):
        raise InvalidJson(f"bytes after the JSON object that ends at byte {end}")
    if asked.api is Api.RESPONSES:
        _responses(ledger, (start, end))
    else:
        _reply(ledger, (start, end))
    return (jsonspan.splice(body, ledger.edits) if ledger.edits else body), ledger.findings


def _reply(ledger: Ledger, span: Span) -> None:
    for key, value in members(ledger.buf, span[0]):
        if key == b"choices" and ledger.opens(value, b"["):
            for position, choice in enumerate(elements(ledger.buf, value[0])):
                if ledger.opens(choice, b"{"):
                    _choice(ledger, choice, position)


def _responses(ledger: Ledger, span: Span) -> None:
    """The same logprobs come again in ``…done`` and ``completed`` events: all are marked, deltas are counted."""
    counted = ledger.findings
    kind = dict(members(ledger.buf, span[0])).get(b"type")
    if kind is not None and ledger.text(kind) != b'"response.output_text.delta"':
        ledger.findings = Findings()
    _descend(ledger, span)
    ledger.findings = counted


def _descend(ledger: Ledger, span: Span) -> None:
    if ledger.opens(span, b"["):
        for element in elements(ledger.buf, span[0]):
            _descend(ledger, element)
    elif ledger.opens(span, b"{"):
        for key, value in members(ledger.buf, span[0]):
            if key == b"logprobs" and ledger.opens(value, b"["):
                ledger.note(0, mark_entries(ledger, value, None, 0))
            elif key in _RESPONSES_PATH:
                _descend(ledger, value)


def _choice(ledger: Ledger, span: Span, position: int) -> None:
    found = dict(members(ledger.buf, span[0]))
    index_token = ledger.text(found[b"index"]) if b"index" in found else b""
    index = int(index_token) if index_token.isdigit() else position
    ids = ledger.ids(found.get(b"token_ids"))
    logprobs = found.get(b"logprobs")
    if logprobs is None or ledger.text(logprobs) in (b"null", b"{}"):
        if ledger.asked.logprobs:
            _all_gone(ledger, span, logprobs, ids, index)
        return
    if not ledger.opens(logprobs, b"{"):
        if ids:
            _replace_object(ledger, logprobs, ids, index, Reason.MALFORMED)
        return
    inside = dict(members(ledger.buf, logprobs[0]))
    if b"content" in inside:
        marked = mark_content(ledger, inside[b"content"], ids, index)
    else:
        marked = mark_lists(ledger, logprobs, inside, ids, index)
    if marked:
        _report(ledger, logprobs, inside, marked, index)


def _all_gone(ledger: Ledger, choice: Span, logprobs: Span | None, ids: list[int] | None, index: int) -> None:
    """``logprobs`` is null or absent although asked for."""
    if not ids:
        if ids is None and not ledger.asked.stream:
            ledger.findings.unmarkable += 1
        return
    if logprobs is not None:
        _replace_object(ledger, logprobs, ids, index, Reason.MISSING)
        return
    new = marks.logprobs_object(*ledger.style, ids, Reason.MISSING)
    ledger.edits.append(marks.insert_member(ledger.buf, choice, b'"logprobs":' + new))
    ledger.note(index, ledger.all_of(Reason.MISSING, len(ids), index))


def _replace_object(ledger: Ledger, logprobs: Span, ids: list[int], index: int, reason: Reason) -> None:
    ledger.edits.append((*logprobs, marks.logprobs_object(*ledger.style, ids, reason)))
    ledger.note(index, ledger.all_of(reason, len(ids), index))


def _report(
    ledger: Ledger, logprobs: Span, inside: dict[bytes, Span], marked: dict[Reason, list[int]], index: int
) -> None:
    """``unscorable`` inside the logprobs object; one that is there (a sidecar upstream) is replaced."""
    ledger.note(index, marked)
    code = marks.positions(marked)
    if b"unscorable" in inside:
        ledger.edits.append((*inside[b"unscorable"], code))
    else:
        ledger.edits.append((logprobs[1] - 1, logprobs[1] - 1, (b"," if inside else b"") + b'"unscorable":' + code))
