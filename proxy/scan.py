"""Recognises a clean reply by its bytes, without decoding it. Core.

Knows the layouts vLLM's two servers write; anything else is "not proved clean" and goes to ``proxy.logprobs``, which
decides. So a wrong None costs time, a wrong count would let a bad number pass: every step here errs towards None.

Why searching bytes is sound: in valid JSON a quote that is not escaped opens or closes a string. A marker such as
``],"tokens":[`` holds plain quotes, so inside a string it would have to close it and go on with a bare word, which is
no JSON: where it is found, it is structure.
"""

import re
from collections.abc import Callable

from proxy import jsonbody
from proxy.api import Api
from proxy.unscorable import FLOOR, TOLERANCE

_LOGPROBS = b'"logprobs":'
_INDEX = b'"index":'
_IDS = b',"token_ids":'
_DIGITS = b"0123456789"

# Keys of a completions logprobs object in the order each server writes them.
_PYTHON = (b'{"text_offset":[', b'],"token_logprobs":[', b'],"tokens":[', b'],"top_logprobs":[', b']},"finish_reason":')
_RUST = (b'{"tokens":[', b'],"token_logprobs":[', b'],"top_logprobs":[', b'],"text_offset":[', b"]}")
_CHAT = b'{"content":['

_QUOTED = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_CHAT_NUMBER = re.compile(rb'"logprob":(?:-\d{1,3}(?:\.\d+)?(?:e-\d+)?|0\.0)[,}]')


def clean(body: bytes, api: Api) -> int | None:
    """Number of sampled positions if every one of them is proved a usable logprob, else None."""
    if not body.startswith(b"{") or not body.rstrip().endswith(b"}"):
        return None
    match api:
        case Api.COMPLETIONS:
            return _all_choices(body, _completions)
        case Api.CHAT | Api.BATCH:
            return _all_choices(body, _chat)
        case _:
            return None


def _all_choices(body: bytes, choice: Callable[[bytes, int], tuple[int, int] | None]) -> int | None:
    """Sums over the choices; each must have its logprobs, with nothing of another choice in between."""
    total = at = 0
    while (found := body.find(_LOGPROBS, at)) >= 0:
        if body.count(_INDEX, at, found) != 1 or body[found - 1] not in b",{":
            return None
        judged = choice(body, found + len(_LOGPROBS))
        if judged is None:
            return None
        total += judged[0]
        at = judged[1]
    return None if at == 0 or body.find(_INDEX, at) >= 0 else total


def _completions(body: bytes, start: int) -> tuple[int, int] | None:
    """(positions, where to go on) for the logprobs object at ``start``."""
    layout = _PYTHON if body.startswith(_PYTHON[0], start) else _RUST
    if not body.startswith(layout[0], start):
        return None
    lists: dict[bytes, tuple[int, int]] = {}
    at = start + len(layout[0])
    for marker, following in zip(layout, layout[1:], strict=False):
        end = body.find(following, at)
        if end < 0:
            return None
        lists[marker[3:-3] if marker[0] == 0x5D else marker[2:-3]] = (at, end)
        at = end + len(following)
    offsets, values, top = lists[b"text_offset"], lists[b"token_logprobs"], lists[b"top_logprobs"]
    count = _numbers(body[slice(*values)])
    if count is None or body.find(b'"', *offsets) >= 0 or _has_non_number(body, *top):
        return None
    names = body[slice(*lists[b"tokens"])]
    return _against_ids(body, at, count, names)


def _chat(body: bytes, start: int) -> tuple[int, int] | None:
    if not body.startswith(_CHAT, start):
        return None
    start += len(_CHAT)
    end = body.find(b"]},", start)
    while end >= 0 and not body.startswith((b'"finish_reason":', b'"token_ids":'), end + 3):
        end = body.find(b"]},", end + 1)
    if end < 0:
        if not body.endswith(b"]}}]}"):
            return None
        end = len(body) - 5  # a chunk of the Rust server without token ids
    entries = body[start:end]
    count = entries.count(b'"top_logprobs":')
    numbers = len(_CHAT_NUMBER.findall(entries))
    if numbers != entries.count(b'"logprob":') or numbers != entries.count(b'"token":'):
        return None
    if _has_non_number(body, start, end) or b'"token_id:' in entries:
        return None
    return _against_ids(body, end + 2, count, None)


def _against_ids(body: bytes, at: int, count: int, names: bytes | None) -> tuple[int, int] | None:
    """One entry a token id; without ids, one entry a name."""
    found = body.find(_IDS, at - 1)
    between = body[at:found] if found >= 0 else b"}"
    start = found + len(_IDS)
    if b"}" in between or b"{" in between or not body.startswith(b"[", start):
        if names is None or len(_QUOTED.findall(names)) == count:
            return count, at
        return None
    end = body.find(b"]", start)
    ids = body[start + 1 : end]
    if ids.translate(None, _DIGITS) != b"," * (count - 1) or (not ids and count):
        return None
    if names is not None and b'"token_id:' in names:
        if names.replace(b'"token_id:', b"").replace(b'"', b"") != ids:
            return None
    return count, end


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
        numbers = jsonbody.loads(b"[" + values + b"]")
        return len(numbers) if FLOOR < min(numbers) and max(numbers) <= TOLERANCE else None
    except (jsonbody.InvalidJson, TypeError):
        return None


# Four digits before the point may be the floor; a sign or comma with no digit after it is no number.
_LONG = re.compile(rb"-(?:\d{4}|(?!\d))")


def _has_non_number(body: bytes, start: int, end: int) -> bool:
    """Among candidates any finite number will do, the floor too."""
    return (
        body.find(b"null", start, end) >= 0
        or body.find(b"NaN", start, end) >= 0
        or body.find(b"Infinity", start, end) >= 0
    )
