"""Bytes to value and back. Core.

orjson reads what strict JSON allows; what vLLM's relatives write beyond it (NaN, Infinity, 1e999, lone surrogates) is
read by the standard library. ``orjson.dumps`` writes NaN as null without a word, so only finite values are given to it.
"""

import json
from typing import Any

import orjson


class InvalidJson(ValueError):
    """The bytes are no JSON, not even with the NaN and Infinity literals allowed."""


def loads(raw: bytes) -> Any:
    """Value of ``raw``; raises InvalidJson."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidJson(str(error)) from error


def dumps(value: Any) -> bytes:
    """Compact JSON; strings orjson refuses (lone surrogates, ints over 64 bits) are written by the standard library."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
