"""Marks a completions reply whose lists lie where vLLM puts them, without walking it: what is common is fast. Core.

Does for these replies exactly what ``proxy.logprobs.mark`` does for all (a test compares them); where anything is not
as it nearly always is, ``mark`` here gives None and leaves the reply to that one.
"""

import re
from typing import Any

import orjson

from proxy import candidates, layout, marks
from proxy.api import Api, Asked
from proxy.layout import Lists
from proxy.unscorable import FLOOR, Findings, Reason, Rules, judge

# What no compact list of numbers and nulls holds.
_EMPTY = re.compile(rb"\{\s*\}")
_FOREIGN = (b'"', b"t", b"f", b"N", b"I", b"{", b" ", b"\n", b"\t", b"\r")


def mark(body: bytes, asked: Asked, rules: Rules) -> tuple[bytes, Findings] | None:
    """The reply with its unscorable positions marked and what was found, None if it is not for here."""
    if asked.api is not Api.COMPLETIONS or asked.echo:
        return None
    found = _choices(body)
    indices = _indices(body, found) if found else None
    if found is None or indices is None:
        return None
    findings = Findings()
    parts: list[bytes] = []
    last = 0
    for lists, index in zip(found, indices, strict=True):
        judged = _judge(body, lists, rules)
        if judged is None:
            return None
        count, marked, values = judged
        findings.sampled += count
        if marked:
            findings.marked[index] = marked
            close = lists.end + 1  # of the logprobs object, right behind its last list
            tail = b',"unscorable":' + marks.positions(marked)
            parts += (body[last : lists.values[0]], values, body[lists.values[1] : close], tail)
            last = close
    if not findings.marked:
        return body, findings
    parts.append(body[last:])
    return b"".join(parts), findings


def _choices(body: bytes) -> list[Lists] | None:
    """The lists of each choice, None where one is laid out otherwise."""
    found = []
    at = 0
    while (start := body.find(layout.LOGPROBS, at)) >= 0:
        lists = layout.completions(body, start + len(layout.LOGPROBS))
        if lists is None:
            return None
        found.append(lists)
        at = lists.end if lists.ids is None else lists.ids[1]
    return found


def _indices(body: bytes, found: list[Lists]) -> list[int] | None:
    """Index of each choice, read from what is left once the lists are cut out; None if that is no such reply."""
    kept, last = [], 0
    for start, end in (cut for lists in found for cut in lists.cuts):
        kept.append(body[last:start])
        last = end
    try:
        choices = orjson.loads(b"".join([*kept, body[last:]]))["choices"]
        if len(choices) != len(found):
            return None
        return [_index(choice, at, lists) for at, (choice, lists) in enumerate(zip(choices, found, strict=True))]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None


def _index(choice: dict[str, Any], position: int, lists: Lists) -> int:
    if len(choice["logprobs"]) != 4 or any(choice["logprobs"].values()):  # more than the lists that were cut out
        raise KeyError
    if choice.get("token_ids") != (None if lists.ids is None else []):
        raise KeyError
    index = choice.get("index", position)
    if type(index) is not int or index < 0:
        raise KeyError
    return index


def _judge(body: bytes, lists: Lists, rules: Rules) -> tuple[int, dict[Reason, list[int]], bytes] | None:
    """(number of positions, those to mark, the list with them marked)."""
    inside = body[slice(*lists.values)]
    if any(byte in inside for byte in _FOREIGN) or _may_break(body, lists, rules):
        return None
    try:
        numbers = orjson.loads(b"[" + inside + b"]")
        if not _aligned(body, lists, len(numbers)):
            return None
        tokens = inside.split(b",")
        highest = rules.highest
        bad = [at for at, number in enumerate(numbers) if number is None or not FLOOR < number <= highest]
        known = _with_candidates(body[slice(*lists.top)], len(numbers)) if b"n" in inside else []
    except (orjson.JSONDecodeError, TypeError):
        return None
    marked: dict[Reason, list[int]] = {}
    judged: dict[tuple[bytes, bool], Reason | None] = {}  # bad values are mostly one and the same
    for at in bad:
        key = tokens[at], at < len(known) and known[at]
        if key not in judged:
            judged[key] = judge(key[0], rules, key[1])
        reason = judged[key]
        if reason is None:
            return None
        marked.setdefault(reason, []).append(at)
        tokens[at] = rules.encoding.mark
    return len(numbers), marked, b",".join(tokens)


def _may_break(body: bytes, lists: Lists, rules: Rules) -> bool:
    """A candidate may have to be written otherwise than it came."""
    if rules.encoding.candidate == b"null":
        return candidates.has_literal(body, lists.top)
    return candidates.has_non_number(body, lists.top)


def _aligned(body: bytes, lists: Lists, count: int) -> bool:
    """One name and, where there are ids, one id an entry; names that are ids are left to ``proxy.alignment``."""
    names = orjson.loads(b"[" + body[slice(*lists.names)] + b"]")
    if len(names) != count or any(name[:9] == "token_id:" for name in names[:1]):
        return False
    return lists.ids is None or layout.counts(body[slice(*lists.ids)], count)


def _with_candidates(top: bytes, count: int) -> list[bool]:
    """Whether each position has candidates: an object that is not empty.

    Most often all have, and that is seen by counting: ``},{"`` parts two objects unless it ends a name, where a colon
    follows; what is null is all candidates, no element; no object is empty.
    """
    if (
        top.count(b'},{"') == count - 1
        and b'},{":' not in top
        and top.count(b"null") == top.count(b'":null')
        and _EMPTY.search(top) is None
    ):
        return [True] * count
    return [bool(candidates) for candidates in orjson.loads(b"[" + top + b"]")]
