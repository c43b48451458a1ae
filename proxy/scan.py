"""Recognises a clean reply by its bytes: the lists are scanned, only what is around them is decoded. Core.

Knows the layouts vLLM's two servers write; anything else is "not proved clean" and goes to ``proxy.logprobs``, which
decides. So a wrong None costs time, a wrong count would let a bad number pass: every step here errs towards None.

Why searching bytes is sound: in valid JSON a quote that is not escaped opens or closes a string. A marker such as
``],"tokens":[`` holds plain quotes, so inside a string it would have to close it and go on with a bare word, which is
no JSON: where it is found, it is structure. What is left once the lists are cut out, the skeleton, is small; decoding
it proves that it is JSON and that each choice has had its lists scanned.
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from proxy.api import Api
from proxy.unscorable import FLOOR, TOLERANCE

_LOGPROBS = b'"logprobs":'
_IDS = b',"token_ids":'

# Keys of a completions logprobs object in the order each server writes them, and what follows the last list.
_PYTHON = (b'{"text_offset":[', b'],"token_logprobs":[', b'],"tokens":[', b'],"top_logprobs":[', b']},"finish_reason":')
_RUST = (b'{"tokens":[', b'],"token_logprobs":[', b'],"top_logprobs":[', b'],"text_offset":[', b"]}")
_OF_NUMBERS = (_PYTHON[0], _PYTHON[1], _RUST[3])
_CHAT = b'{"content":['
_AFTER_CHAT = (b'"finish_reason":', b'"token_ids":')

_CHAT_NUMBER = re.compile(rb'"logprob":(?:-\d{1,3}(?:\.\d+)?(?:e-\d+)?|0\.0)[,}]')
_FEW = re.compile(rb"\[(?:-\d{1,3}(?:\.\d++)?+(?:e-\d++)?+(?:,(?!\])|(?=\])))*+\]")
_MOST_OF_FEW = 256  # bytes up to which matching a list costs less than decoding it

# First byte of a float32 (sign, seven bits of the exponent) where it is surely usable: at least 0 and under 2**-11,
# so under the tolerance; under 0 and over -2**13, so over the floor. Rounding to float32 keeps the order.
_USABLE = bytes(range(0x3A)) + bytes(range(0x80, 0xC6))

# What tells a candidate that is no number from one that is: N and I become n, so that null, NaN and Infinity (its sign
# is dropped) all begin alike. Backslashes stay, so that an escaped n after a quote and a colon does not look like one.
_TELLING = bytes.maketrans(b"NI", b"nn")
_LITERAL = re.compile(rb'"\s*:\s*(?:NaN|-?\s*Infinity)')
_NON_NUMBER = re.compile(rb'"\s*:\s*(?:null|NaN|-?\s*Infinity)')
_UNTELLING = bytes(byte for byte in range(256) if byte not in b'":\\nNI')


@dataclass(frozen=True, slots=True)
class _Scanned:
    """Lists of one choice: ``count`` positions proved usable; ``cuts``: where the lists' insides lie, in order."""

    count: int
    cuts: list[tuple[int, int]]


def clean(body: bytes, api: Api, *, null_candidates: bool = False) -> int | None:
    """Number of sampled positions if every one of them is proved a usable logprob, else None.

    ``null_candidates``: a null among the candidates may stay as it is.
    """
    if api not in (Api.COMPLETIONS, Api.CHAT, Api.BATCH):
        return None
    scan = _completions if api is Api.COMPLETIONS else _chat
    has_non_number = _has_literal if null_candidates else _has_non_number
    total = choices = last = 0
    kept = []
    while (found := body.find(_LOGPROBS, last)) >= 0:
        scanned = scan(body, found + len(_LOGPROBS), has_non_number)
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


def _completions(body: bytes, start: int, has_non_number: Callable[[bytes], bool]) -> _Scanned | None:
    layout = _PYTHON if body.startswith(_PYTHON[0], start) else _RUST
    if not body.startswith(layout[0], start):
        return None
    lists: dict[bytes, tuple[int, int]] = {}
    at = start + len(layout[0])
    for marker, following in zip(layout, layout[1:], strict=False):
        if marker in _OF_NUMBERS:  # no bracket in there: looking for one byte is looking at many at once
            end = body.find(b"]", at)
            if not body.startswith(following, end):
                return None
        else:
            end = body.find(following, at)
        if end < 0:
            return None
        lists[marker[2:-3].lstrip(b',"')] = (at, end)
        at = end + len(following)
    first, last = lists[b"token_logprobs"]
    count = _numbers(body[first - 1 : last + 1])
    if count is None or has_non_number(body[slice(*lists[b"top_logprobs"])]):
        return None
    if body.find(b'"', *lists[b"text_offset"]) >= 0:
        return None
    return _against_ids(body, _Scanned(count, list(lists.values())), body[slice(*lists[b"tokens"])])


def _chat(body: bytes, start: int, has_non_number: Callable[[bytes], bool]) -> _Scanned | None:
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
    if has_non_number(entries) or b'"token_id:' in entries:
        return None
    return _against_ids(body, _Scanned(entries.count(b'"top_logprobs":'), [(start, end)]), None)


def _against_ids(body: bytes, scanned: _Scanned, names: bytes | None) -> _Scanned | None:
    """One entry a token id, and the very ids where entries are named so; without ids, one entry a name."""
    count, after = scanned.count, scanned.cuts[-1][1]
    found = body.find(_IDS, after)
    start = found + len(_IDS)
    between = body[after + 2 : found] if found >= 0 else b"{"
    if b"{" in between or b"}" in between or not body.startswith(b"[", start):
        return scanned if names is None or _length(names) == count else None
    end = body.find(b"]", start)
    ids = body[start + 1 : end]
    if ids.translate(None, b"0123456789") != b"," * (count - 1) or bool(ids) is not bool(count):
        return None
    if b",," in ids or ids.startswith(b",") or ids.endswith(b","):
        return None
    if names is not None and (names.startswith(b'"token_id:') or not names.startswith(b'"')):
        # Names are ids where all of them look so; the first tells.
        if names.replace(b'"token_id:', b"").replace(b'"', b"") != ids:
            return None
    return _Scanned(count, [*scanned.cuts, (start + 1, end)])


def _numbers(values: bytes) -> int | None:
    """Length of a list of usable logprobs, None if one may not be usable; the brackets are there."""
    if len(values) <= _MOST_OF_FEW and _FEW.fullmatch(values):
        return values.count(b",") + (len(values) > 2)
    if b"f" in values:  # false would pack as 0.0; true packs as 1.0, which is too much
        return None
    try:
        numbers = orjson.loads(values)
        packed = struct.pack(f">{len(numbers)}f", *numbers)
    except (orjson.JSONDecodeError, struct.error, OverflowError):
        return None
    usable = not packed[::4].translate(None, _USABLE) or (FLOOR < min(numbers) and max(numbers) <= TOLERANCE)
    return len(numbers) if usable else None


def _length(values: bytes) -> int | None:
    try:
        return len(orjson.loads(b"[" + values + b"]"))
    except orjson.JSONDecodeError:
        return None


def _has_literal(values: bytes) -> bool:
    """NaN or Infinity may be a candidate. Capital N and I are rare, and finding one byte is finding it among many."""
    for first, word in ((b"N", b"NaN"), (b"I", b"Infinity")):
        at = values.find(first)
        while at >= 0:
            if values.startswith(word, at):  # as a value, or in a name
                return _LITERAL.search(values) is not None
            at = values.find(first, at + 1)
    return False


def _has_non_number(values: bytes) -> bool:
    """A candidate may be no finite number; the floor is one.

    A value follows its key's closing quote and a colon, and of a value that is a number nothing is kept. A name that
    begins with a colon (``:return``) can look so as well; a closer look tells most of these.
    """
    return b'":n' in values.translate(_TELLING, _UNTELLING) and _NON_NUMBER.search(values) is not None
