"""Sees by its bytes whether a candidate in ``top_logprobs`` is no finite number. Core.

A candidate that overflows a double is not seen: vLLM's are float32.
"""

import re

# What tells a candidate that is no number from one that is: N and I become n, so that null, NaN and Infinity (its sign
# is dropped) all begin alike. Backslashes stay, so that an escaped n after a quote and a colon does not look like one.
_TELLING = bytes.maketrans(b"NI", b"nn")
_LITERAL = re.compile(rb'"\s*:\s*(?:NaN|-?\s*Infinity)')
_NON_NUMBER = re.compile(rb'"\s*:\s*(?:null|NaN|-?\s*Infinity)')
_OFTEN = 256
_UNTELLING = bytes(byte for byte in range(256) if byte not in b'":\\nNI')


def has_literal(values: bytes) -> bool:
    """NaN or Infinity may be a candidate."""
    if _holds(values, b"N", b"NaN") or _holds(values, b"I", b"Infinity"):  # as a value, or in a name
        return _LITERAL.search(values) is not None
    return False


def _holds(values: bytes, first: bytes, word: bytes) -> bool:
    """``word in values``, which is faster where its first byte is rare: one byte is found among many at once."""
    at = values.find(first)
    for _ in range(_OFTEN):
        if at < 0:
            return False
        if values.startswith(word, at):
            return True
        at = values.find(first, at + 1)
    return values.find(word, at) >= 0


def has_non_number(values: bytes) -> bool:
    """A candidate may be no finite number; the floor is one.

    A value follows its key's closing quote and a colon, and of a value that is a number nothing is kept. A name that
    begins with a colon (``:return``) can look so as well; a closer look tells most of these.
    """
    return b'":n' in values.translate(_TELLING, _UNTELLING) and _NON_NUMBER.search(values) is not None
