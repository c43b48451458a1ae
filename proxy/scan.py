"""Recognises a clean reply by its bytes: the lists are looked through, only what is around them is decoded. Core.

Knows the layouts vLLM's two servers write (proxy.layout); anything else is "not proved clean" and goes to
``proxy.logprobs``, which decides. So a wrong None costs time, a wrong count would let a bad number pass: every step
errs towards None. What is left once the lists are cut out, the skeleton, is small; decoding it proves that it is JSON
and that each choice has had its lists looked through.
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from proxy import candidates, events, layout
from proxy.api import Api
from proxy.unscorable import FLOOR, TOLERANCE

_CHAT = b'{"content":['
_AFTER_CHAT = (b']},"finish_reason":', b']},"token_ids":')

_FEW = re.compile(rb"\[(?:-\d{1,3}(?:\.\d++)?+(?:e-\d++)?+(?:,(?!\])|(?=\])))*+\]")
_MOST_OF_FEW = 256  # bytes up to which matching a list costs less than decoding it

# First byte of a float32 (sign, seven bits of the exponent) where it is surely usable: at least 0 and under 2**-11,
# so under the tolerance; under 0 and over -2**13, so over the floor. Rounding to float32 keeps the order.
_USABLE = bytes(range(0x3A)) + bytes(range(0x80, 0xC6))


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
    has_non_number = candidates.has_literal if null_candidates else candidates.has_non_number
    total = choices = last = 0
    kept = []
    while (found := body.find(layout.LOGPROBS, last)) >= 0:
        start = found + len(layout.LOGPROBS)
        scanned = _completions(body, start, has_non_number) if api is Api.COMPLETIONS else _chat(body, start)
        if scanned is None:
            return None
        total += scanned.count
        choices += 1
        for start, end in scanned.cuts:
            kept.append(body[last:start])
            last = end
        if (prompt := layout.prompt_ids(body, last)) is not None:
            kept.append(body[last : prompt[0]])
            last = prompt[1]
    kept.append(body[last:])
    return total if choices and _holds(b"".join(kept), choices) else None


def _holds(skeleton: bytes, choices: int) -> bool:
    """The skeleton is a reply with so many choices, none with logprobs or ids that have not been looked through."""
    try:
        reply = orjson.loads(skeleton)
        found = reply["choices"]
        return len(found) == choices and all(
            not any(choice["logprobs"].values()) and choice.get("token_ids") in (None, []) for choice in found
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return False


def _completions(body: bytes, start: int, has_non_number: Callable[[bytes, layout.Span], bool]) -> _Scanned | None:
    lists = layout.completions(body, start)
    if lists is None:
        return None
    first, last = lists.values
    count = _numbers(body[first - 1 : last + 1])
    if count is None or has_non_number(body, lists.top) or body.find(b'"', *lists.offsets) >= 0:
        return None
    if lists.ids is None:
        fits = _length(body[slice(*lists.names)]) == count
    else:
        ids = body[slice(*lists.ids)]
        fits = layout.counts(ids, count) and _may_be_named(body, lists.names, ids)
    return _Scanned(count, lists.cuts) if fits else None


def _chat(body: bytes, start: int) -> _Scanned | None:
    if not body.startswith(_CHAT, start):
        return None
    start += len(_CHAT)
    ends = [end for marker in _AFTER_CHAT if (end := body.find(marker, start)) >= 0]
    if not ends and not body.endswith(b"]}}]}"):
        return None
    end = min(ends, default=len(body) - 5)  # a chunk of the Rust server without token ids
    count = events.chat_tokens(body[start:end])
    if count is None:
        return None
    ids = layout.ids(body, end)
    if ids is None:
        return _Scanned(count, [(start, end)])
    return _Scanned(count, [(start, end), ids]) if layout.counts(body[slice(*ids)], count) else None


def _may_be_named(body: bytes, names: layout.Span, ids: bytes) -> bool:
    """Entries are named otherwise than by ids, which the first tells, or by these very ids."""
    if body.startswith(b'"', names[0]) and not body.startswith(b'"token_id:', names[0]):
        return True
    return body[slice(*names)].replace(b'"token_id:', b"").replace(b'"', b"") == ids


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
