"""Sees by its bytes whether a candidate in ``top_logprobs`` is no finite number. Core.

A candidate that overflows a double is not seen: vLLM's are float32.
"""

import re

from proxy.layout import Span

# What tells a candidate that is no number from one that is: N and I become n, so that null, NaN and Infinity (its sign
# is dropped) all begin alike. Backslashes stay, so that an escaped n after a quote and a colon does not look like one.
_TELLING = bytes.maketrans(b"NI", b"nn")
_LITERAL = re.compile(rb'"\s*:\s*(?:NaN|-?\s*Infinity)')
_NON_NUMBER = re.compile(rb'"\s*:\s*(?:null|NaN|-?\s*Infinity)')
_OFTEN = 256
_UNTELLING = bytes(byte for byte in range(256) if byte not in b'":\\nNI')


def has_literal(body: bytes, span: Span) -> bool:
    """NaN or Infinity may be a candidate."""
    if _holds(body, span, b"N", b"NaN") or _holds(body, span, b"I", b"Infinity"):  # as a value, or in a name
        return _LITERAL.search(body, *span) is not None
    return False


def _holds(body: bytes, span: Span, first: bytes, word: bytes) -> bool:
    """``word`` is there, seen faster where its first byte is rare: one byte is found among many at once."""
    end = span[1]
    at = body.find(first, *span)
    for _ in range(_OFTEN):
        if at < 0:
            return False
        if body.startswith(word, at):
            return True
        at = body.find(first, at + 1, end)
    return at >= 0 and body.find(word, at, end) >= 0


def has_non_number(body: bytes, span: Span) -> bool:
    """A candidate may be no finite number; the floor is one.

    A value follows its key's closing quote and a colon, and of a value that is a number nothing is kept. A name that
    begins with a colon (``:return``) can look so as well; a closer look tells most of these.
    """
    looks_so = b'":n' in body[slice(*span)].translate(_TELLING, _UNTELLING)
    return looks_so and _NON_NUMBER.search(body, *span) is not None
