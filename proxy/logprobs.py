"""Finds the logprobs in one JSON reply or event, judges them, and splices marks in. Core.

Works on spans of the bytes that came: what is not marked leaves as it was written. ``proxy.unscorable`` judges one
value; here is decided where values lie, which positions belong to sampled tokens, and whether the list is aligned.
"""

import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, TypeGuard

from proxy import jsonspan, marks
from proxy.api import Api, Asked
from proxy.jsonbody import InvalidJson, loads
from proxy.jsonspan import Span, elements, members
from proxy.unscorable import FLOOR, Findings, Reason, Rules, breaks_candidate, judge

Edit = tuple[int, int, bytes]

# Objects of /v1/responses that hold lists of logprobs somewhere below them.
_RESPONSES_PATH = frozenset((b"response", b"output", b"item", b"part", b"content"))

_NAMES_ID = re.compile(r"token_id:\d+")
_NOT_FLAT = re.compile(rb'[\s"\[{]')
# null, NaN, Infinity, or an exponent that may overflow a double.
_NON_NUMBER = re.compile(rb"null|NaN|Infinity|[eE]\+?\d{3}")


def mark(body: bytes, asked: Asked, rules: Rules, before: dict[int, int] | None = None) -> tuple[bytes, Findings]:
    """Reply or event with its unscorable positions marked, and what was found.

    ``before``: positions each choice has had in earlier events of the same stream; updated here.
    With nothing to mark the very object ``body`` comes back. Raises InvalidJson.
    """
    marker = _Marker(body, asked, rules, {} if before is None else before)
    start = jsonspan.after_space(body, 0)
    if body[start : start + 1] != b"{":
        raise InvalidJson("the reply is no JSON object")
    end = jsonspan.skip(body, start)
    if jsonspan.after_space(body, end) != len(body):
        raise InvalidJson(f"bytes after the JSON object that ends at byte {end}")
    if asked.api is Api.RESPONSES:
        marker.responses((start, end))
    else:
        marker.reply((start, end))
    return (jsonspan.splice(body, marker.edits) if marker.edits else body), marker.findings


class _Marker:
    """One walk over one reply: collects edits and findings."""

    def __init__(self, buf: bytes, asked: Asked, rules: Rules, before: dict[int, int]) -> None:
        self.buf = buf
        self.asked = asked
        self.rules = rules
        self.before = before
        self._style = (asked.api, rules.encoding)
        self.edits: list[Edit] = []
        self.findings = Findings()

    def reply(self, span: Span) -> None:
        for key, value in members(self.buf, span[0]):
            if key == b"choices" and self._opens(value, b"["):
                for position, choice in enumerate(elements(self.buf, value[0])):
                    if self._opens(choice, b"{"):
                        self._choice(choice, position)

    def responses(self, span: Span) -> None:
        """The same logprobs come again in ``…done`` and ``completed`` events: all are marked, deltas are counted."""
        counted = self.findings
        kind = dict(members(self.buf, span[0])).get(b"type")
        if kind is not None and self._text(kind) not in (b'"response.output_text.delta"',):
            self.findings = Findings()
        self._descend(span)
        self.findings = counted

    def _descend(self, span: Span) -> None:
        if self._opens(span, b"["):
            for element in elements(self.buf, span[0]):
                self._descend(element)
        elif self._opens(span, b"{"):
            for key, value in members(self.buf, span[0]):
                if key == b"logprobs" and self._opens(value, b"["):
                    self._note(0, self._entries(value, None, 0))
                elif key in _RESPONSES_PATH:
                    self._descend(value)

    def _choice(self, span: Span, position: int) -> None:
        found = dict(members(self.buf, span[0]))
        index = _as_int(self._text(found[b"index"])) if b"index" in found else position
        ids = self._ids(found.get(b"token_ids"))
        logprobs = found.get(b"logprobs")
        if logprobs is None or self._text(logprobs) == b"null":
            if self.asked.logprobs:
                self._all_gone(span, logprobs, ids, index)
            return
        if not self._opens(logprobs, b"{"):
            if ids:
                self._replace_object(logprobs, ids, index, Reason.MALFORMED)
            return
        inside = dict(members(self.buf, logprobs[0]))
        if not inside:
            self._all_gone(span, logprobs, ids, index)
            return
        if b"content" in inside:
            marked = self._content(inside[b"content"], ids, index)
        else:
            marked = self._lists(logprobs, inside, ids, index)
        if marked:
            self._report(logprobs, inside, marked, index)

    def _lists(
        self, logprobs: Span, inside: dict[bytes, Span], ids: list[int] | None, index: int
    ) -> dict[Reason, list[int]]:
        """Completions: parallel lists."""
        span = inside.get(b"token_logprobs")
        names = loads(self._text(inside[b"tokens"])) if self._opens(inside.get(b"tokens"), b"[") else None
        due = len(ids) if ids is not None else len(names) if names is not None else 0
        if span is None or not self._opens(span, b"["):
            reason = Reason.MISSING if span is None or self._text(span) == b"null" else Reason.MALFORMED
            if not due or not self.asked.logprobs:
                return {}
            row = marks.row(self.rules.encoding, due)
            self.edits.append(
                marks.insert_member(self.buf, logprobs, b'"token_logprobs":' + row) if span is None else (*span, row)
            )
            return self._count(due, {reason: list(range(due))}, index)
        values, starts = self._values(span)
        if not self._aligned(len(values), ids, names):
            due = due or len(values)
            self.edits.append((*span, marks.row(self.rules.encoding, due)))
            return self._count(due, {Reason.MISALIGNED: list(range(due))}, index)
        marked = self._judge_list(values, starts, inside.get(b"top_logprobs"), index)
        return self._count(len(values), marked, index)

    def _judge_list(
        self, values: list[bytes], starts: list[int], top: Span | None, index: int
    ) -> dict[Reason, list[int]]:
        marked: dict[Reason, list[int]] = {}
        candidates: list[Span] | None = None
        highest, code = self.rules.highest, self.rules.encoding.mark
        for i, token in enumerate(values):
            try:
                if FLOOR < float(token) <= highest:
                    continue
            except ValueError:
                pass
            if candidates is None:
                candidates = list(elements(self.buf, top[0])) if top and self._opens(top, b"[") else []
            has_candidates = i < len(candidates) and self._text(candidates[i]) not in (b"null", b"{}")
            if self.asked.echo and i == 0 and not self.before.get(index) and token == b"null" and not has_candidates:
                continue  # the first prompt token: nothing stands before it
            reason = judge(token, self.rules, has_candidates)
            if reason is not None:
                marked.setdefault(reason, []).append(i)
                self.edits.append((starts[i], starts[i] + len(token), code))
        if top is not None and self._may_hold_non_numbers(top):
            for candidate in candidates if candidates is not None else elements(self.buf, top[0]):
                if self._opens(candidate, b"{"):
                    self._candidates(value for _, value in members(self.buf, candidate[0]))
        return marked

    def _content(self, span: Span, ids: list[int] | None, index: int) -> dict[Reason, list[int]]:
        """Chat and generate: one object a token."""
        if not self._opens(span, b"["):
            if not ids or not self.asked.logprobs:
                return {}
            self.edits.append((*span, b"[" + marks.entries(*self._style, ids) + b"]"))
            return self._count(len(ids), {Reason.MISSING: list(range(len(ids)))}, index)
        return self._entries(span, ids, index)

    def _entries(self, span: Span, ids: list[int] | None, index: int) -> dict[Reason, list[int]]:
        spans = list(elements(self.buf, span[0]))
        entries = [dict(members(self.buf, entry[0])) if self._opens(entry, b"{") else {} for entry in spans]
        aligned = self._aligned(len(entries), ids, [self._name(entry) for entry in entries])
        marked: dict[Reason, list[int]] = {}
        for i, (at, entry) in enumerate(zip(spans, entries, strict=True)):
            if ids is not None and i >= len(ids):
                break
            reason = self._judge_entry(at, entry, aligned)
            if reason is not None:
                marked.setdefault(reason, []).append(i)
        due = len(entries)
        if ids is not None and len(ids) != due:
            due = len(ids)
            self._resize(span, spans, ids)
            marked = {Reason.MISALIGNED: list(range(due))}
        return self._count(due, marked, index)

    def _judge_entry(self, at: Span, entry: dict[bytes, Span], aligned: bool) -> Reason | None:
        code = self.rules.encoding.mark
        if b"top_logprobs" in entry and self._may_hold_non_numbers(entry[b"top_logprobs"]):
            self._candidates(self._candidate_entries(entry[b"top_logprobs"]))
        if not entry:
            self.edits.append((*at, marks.entry(*self._style, None)))
            return Reason.MISALIGNED if not aligned else Reason.MISSING
        value = entry.get(b"logprob")
        reason = Reason.MISSING if value is None else judge(self._text(value), self.rules, True)
        if not aligned:
            reason = Reason.MISALIGNED
        if reason is not None:
            self.edits.append(
                marks.insert_member(self.buf, at, b'"logprob":' + code) if value is None else (*value, code)
            )
        return reason

    def _candidate_entries(self, span: Span) -> Iterable[Span]:
        if self._opens(span, b"["):
            for entry in elements(self.buf, span[0]):
                if self._opens(entry, b"{"):
                    yield from (value for key, value in members(self.buf, entry[0]) if key == b"logprob")

    def _candidates(self, values: Iterable[Span]) -> None:
        code = self.rules.encoding.candidate
        for value in values:
            token = self._text(value)
            if token != code and breaks_candidate(token):
                self.edits.append((*value, code))

    def _all_gone(self, choice: Span, logprobs: Span | None, ids: list[int] | None, index: int) -> None:
        """``logprobs`` is null or absent although asked for."""
        if not self.asked.stream and ids is None:
            self.findings.unmarkable += 1
        if not ids:
            return
        if logprobs is not None:
            self._replace_object(logprobs, ids, index, Reason.MISSING)
            return
        self.edits.append(
            marks.insert_member(
                self.buf, choice, b'"logprobs":' + marks.logprobs_object(*self._style, ids, Reason.MISSING)
            )
        )
        self._count(len(ids), {Reason.MISSING: list(range(len(ids)))}, index)
        self._note(index, {Reason.MISSING: list(range(len(ids)))})

    def _replace_object(self, logprobs: Span, ids: list[int], index: int, reason: Reason) -> None:
        self.edits.append((*logprobs, marks.logprobs_object(*self._style, ids, reason)))
        self._count(len(ids), {}, index)
        self._note(index, {reason: list(range(len(ids)))})

    def _resize(self, span: Span, spans: list[Span], ids: list[int]) -> None:
        """One entry a token id: what is too much goes, what lacks comes as a marked entry."""
        if len(spans) > len(ids):
            start = spans[len(ids) - 1][1] if ids else span[0] + 1
            self.edits.append((start, span[1] - 1, b""))
            return
        new = marks.entries(*self._style, ids[len(spans) :])
        self.edits.append((span[1] - 1, span[1] - 1, b"," + new if spans else new))

    def _report(self, logprobs: Span, inside: dict[bytes, Span], marked: dict[Reason, list[int]], index: int) -> None:
        self._note(index, marked)
        code = marks.positions(marked)
        if b"unscorable" in inside:
            self.edits.append((*inside[b"unscorable"], code))
        else:
            self.edits.append((logprobs[1] - 1, logprobs[1] - 1, (b"," if inside else b"") + b'"unscorable":' + code))

    def _note(self, index: int, marked: dict[Reason, list[int]]) -> None:
        if not marked:
            return
        choice = self.findings.marked.setdefault(index, {})
        for reason, positions in marked.items():
            choice.setdefault(reason, []).extend(positions)

    def _count(self, due: int, marked: dict[Reason, list[int]], index: int) -> dict[Reason, list[int]]:
        self.findings.sampled += due
        self.before[index] = self.before.get(index, 0) + due
        return marked

    def _aligned(self, count: int, ids: list[int] | None, names: list[Any] | None) -> bool:
        """One entry a sampled token, and entries named ``token_id:N`` name the ids that stand there.

        Under echo the prompt's positions come first and ``token_ids`` lists the generated ones alone; with
        ``max_tokens: 0`` there are none of those.
        """
        if names is not None and len(names) != count:
            return False
        if not ids:
            return ids is None or count == 0 or self.asked.echo
        if count != len(ids) and not self.asked.echo:
            return False
        if count < len(ids):
            return self.asked.body is not None and self.asked.body.get("max_tokens") == 0
        named = [name for name in (names or ())[-len(ids) :] if isinstance(name, str)]
        if len(named) != len(ids) or not all(map(_NAMES_ID.fullmatch, named)):
            return True
        return [int(name[9:]) for name in named] == ids

    def _name(self, entry: dict[bytes, Span]) -> str | None:
        if b"token_id" in entry:
            return "token_id:" + self._text(entry[b"token_id"]).decode()
        token = self._text(entry[b"token"]) if b"token" in entry else b""
        return token[1:-1].decode() if token.startswith(b'"token_id:') else None

    def _values(self, span: Span) -> tuple[list[bytes], list[int]]:
        """Elements of a list and where each starts; flat lists, which nearly all are, without a walk."""
        inner = self.buf[span[0] + 1 : span[1] - 1]
        if not inner.strip():
            return [], []
        if _NOT_FLAT.search(inner):
            spans = list(elements(self.buf, span[0]))
            return [self._text(value) for value in spans], [start for start, _ in spans]
        values = inner.split(b",")
        starts = list(accumulate(map(len, values[:-1]), lambda at, size: at + size + 1, initial=span[0] + 1))
        return values, starts

    def _ids(self, span: Span | None) -> list[int] | None:
        if not self._opens(span, b"["):
            return None
        ids = loads(self._text(span))
        return ids if all(type(token_id) is int for token_id in ids) else None

    def _may_hold_non_numbers(self, span: Span) -> bool:
        return _NON_NUMBER.search(self.buf, *span) is not None

    def _opens(self, span: Span | None, bracket: bytes) -> TypeGuard[Span]:
        return span is not None and self.buf[span[0] : span[0] + 1] == bracket

    def _text(self, span: Span) -> bytes:
        return self.buf[span[0] : span[1]]


def _as_int(token: bytes) -> int:
    return int(token) if token.isdigit() else 0
