"""Recognises a clean reply by its bytes: the lists are scanned, only what is around them is decoded. Core.

Knows the layouts vLLM's two servers write; anything else is "not proved clean" and goes to ``proxy.logprobs``, which
decides. So a wrong None costs time, a wrong count would let a bad number pass: every step here errs towards None.

Why searching bytes is sound: in valid JSON a quote that is not escaped opens or closes a string. A marker such as
``],"tokens":[`` holds plain quotes, so inside a string it would have to close it and go on with a bare word, which is
no JSON: where it is found, it is structure. What is left once the lists are cut out, the skeleton, is small; decoding
it proves that it is JSON and that each choice has had its lists scanned.
"""

import re
from dataclasses import dataclass

import orjson

from proxy.api import Api
from proxy.unscorable import FLOOR, TOLERANCE

_LOGPROBS = b'"logprobs":'
_IDS = b',"token_ids":'

# Keys of a completions logprobs object in the order each server writes them, and what follows the last list.
_PYTHON = (b'{"text_offset":[', b'],"token_logprobs":[', b'],"tokens":[', b'],"top_logprobs":[', b']},"finish_reason":')
_RUST = (b'{"tokens":[', b'],"token_logprobs":[', b'],"top_logprobs":[', b'],"text_offset":[', b"]}")
_CHAT = b'{"content":['
_AFTER_CHAT = (b'"finish_reason":', b'"token_ids":')

_QUOTED = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_CHAT_NUMBER = re.compile(rb'"logprob":(?:-\d{1,3}(?:\.\d+)?(?:e-\d+)?|0\.0)[,}]')
# Four digits before the point may be the floor; a sign with no digit after it is no number.
_LONG = re.compile(rb"-(?:\d{4}|(?!\d))")


@dataclass(frozen=True, slots=True)
class _Scanned:
    """Lists of one choice: ``count`` positions proved usable; ``cuts``: where the lists' insides lie, in order."""

    count: int
    cuts: list[tuple[int, int]]


def clean(body: bytes, api: Api) -> int | None:
    """Number of sampled positions if every one of them is proved a usable logprob, else None."""
    if api not in (Api.COMPLETIONS, Api.CHAT, Api.BATCH):
        return None
    scan = _completions if api is Api.COMPLETIONS else _chat
    total = choices = last = 0
    kept = []
    while (found := body.find(_LOGPROBS, last)) >= 0:
        scanned = scan(body, found + len(_LOGPROBS))
        if scanned is None:
            return None
        total += scanned.count
        choices += 1
        for start, end in scanned.cuts:
            kept.append(body[last:start])
            last = end
    kept.append(body[last:])
    return total if choices and _holds(b"".join(kept), choices) else None


def _holds(skeleton: bytes, choices: int) -> bool:
    """The skeleton is a reply with so many choices, each with its logprobs and no token ids left to compare."""
    try:
        reply = orjson.loads(skeleton)
        found = reply["choices"]
        return len(found) == choices and all(
            type(choice["logprobs"]) is dict and choice.get("token_ids") in (None, []) for choice in found
        )
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False


def _completions(body: bytes, start: int) -> _Scanned | None:
    layout = _PYTHON if body.startswith(_PYTHON[0], start) else _RUST
    if not body.startswith(layout[0], start):
        return None
    lists: dict[bytes, tuple[int, int]] = {}
    at = start + len(layout[0])
    for marker, following in zip(layout, layout[1:], strict=False):
        end = body.find(following, at)
        if end < 0:
            return None
        lists[marker[2:-3].lstrip(b',"')] = (at, end)
        at = end + len(following)
    count = _numbers(body[slice(*lists[b"token_logprobs"])])
    if count is None or body.find(b'"', *lists[b"text_offset"]) >= 0 or _has_non_number(body, *lists[b"top_logprobs"]):
        return None
    return _against_ids(body, _Scanned(count, list(lists.values())), body[slice(*lists[b"tokens"])])


def _chat(body: bytes, start: int) -> _Scanned | None:
    if not body.startswith(_CHAT, start):
        return None
    start += len(_CHAT)
    end = body.find(b"]},", start)
    while end >= 0 and not body.startswith(_AFTER_CHAT, end + 3):
        end = body.find(b"]},", end + 1)
    if end < 0:
        if not body.endswith(b"]}}]}"):
            return None
        end = len(body) - 5  # a chunk of the Rust server without token ids
    entries = body[start:end]
    numbers = len(_CHAT_NUMBER.findall(entries))
    if numbers != entries.count(b'"logprob":') or numbers != entries.count(b'"token":'):
        return None
    if _has_non_number(body, start, end) or b'"token_id:' in entries:
        return None
    return _against_ids(body, _Scanned(entries.count(b'"top_logprobs":'), [(start, end)]), None)


def _against_ids(body: bytes, scanned: _Scanned, names: bytes | None) -> _Scanned | None:
    """One entry a token id, and the very ids where entries are named so; without ids, one entry a name."""
    count, after = scanned.count, scanned.cuts[-1][1]
    found = body.find(_IDS, after)
    start = found + len(_IDS)
    between = body[after + 2 : found] if found >= 0 else b"{"
    if b"{" in between or b"}" in between or not body.startswith(b"[", start):
        return scanned if names is None or len(_QUOTED.findall(names)) == count else None
    end = body.find(b"]", start)
    ids = body[start + 1 : end]
    if ids.translate(None, b"0123456789") != b"," * (count - 1) or bool(ids) is not bool(count):
        return None
    if b",," in ids or ids.startswith(b",") or ids.endswith(b","):
        return None
    if names is not None and b'"token_id:' in names:
        if names.replace(b'"token_id:', b"").replace(b'"', b"") != ids:
            return None
    return _Scanned(count, [*scanned.cuts, (start + 1, end)])


def _numbers(values: bytes) -> int | None:
    """Length of a list of usable logprobs, None if one may not be usable.

    Nearly always all are negative with at most three digits before the point: two passes over the bytes prove it.
    """
    if not values:
        return 0
    shape = values.translate(None, b"0123456789.").replace(b"e-", b"")
    count = (len(shape) + 1) // 2
    if shape == b"-," * (count - 1) + b"-" and _LONG.search(values) is None:
        return count
    try:
        numbers = orjson.loads(b"[" + values + b"]")
        return len(numbers) if FLOOR < min(numbers) and max(numbers) <= TOLERANCE else None
    except (orjson.JSONDecodeError, TypeError):
        return None


def _has_non_number(body: bytes, start: int, end: int) -> bool:
    """Among candidates any finite number will do, the floor too."""
    return (
        body.find(b"null", start, end) >= 0
        or body.find(b"NaN", start, end) >= 0
        or body.find(b"Infinity", start, end) >= 0
    )
