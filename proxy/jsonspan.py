"""Where values lie in JSON bytes, so that one value can be replaced and every other byte left alone. Core.

A decode and re-encode is no identity (big integers, float spellings, duplicate keys, lone surrogates), a splice is.
Nothing here judges values: ``skip`` finds where one ends. Broken structure raises InvalidJson.
"""

import re
from collections.abc import Iterator
from itertools import accumulate

from proxy.jsonbody import InvalidJson, loads

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb'[^\s,:\[\]{}"]++')

# A container and what is nested in it, three levels deep, in one match; deeper ones are walked bracket by bracket.
_TEXT = rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")'
_LEVEL1 = rb"[\[{]" + _TEXT + rb"*+[\]}]"
_LEVEL2 = rb"[\[{](?:" + _TEXT + rb"|" + _LEVEL1 + rb")*+[\]}]"
_LEVEL3 = rb"[\[{](?:" + _TEXT + rb"|" + _LEVEL2 + rb")*+[\]}]"
_CONTAINER = re.compile(_LEVEL3, re.DOTALL)
_BRACKET_OR_STRING = re.compile(rb'[\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_FLAT = re.compile(rb'[\s"\[{]')

Span = tuple[int, int]


def after_space(buf: bytes, pos: int) -> int:
    match = _SPACE.match(buf, pos)
    return match.end() if match else pos


def skip(buf: bytes, pos: int) -> int:
    """End of the value that starts at ``pos``."""
    first = buf[pos : pos + 1]
    if first == b'"':
        match = _STRING.match(buf, pos)
    elif first in (b"[", b"{"):
        match = _CONTAINER.match(buf, pos)
        if match is None:
            return _skip_deep(buf, pos)
    else:
        match = _SCALAR.match(buf, pos)
    if match is None:
        raise InvalidJson(f"no JSON value at byte {pos}")
    return match.end()


def _skip_deep(buf: bytes, pos: int) -> int:
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(buf, pos):
        bracket = buf[match.start()]
        if bracket in b"[{":
            depth += 1
        elif bracket in b"]}":
            depth -= 1
            if depth == 0:
                return match.end()
    raise InvalidJson(f"the container that starts at byte {pos} does not end")


def members(buf: bytes, pos: int) -> Iterator[tuple[bytes, Span]]:
    """(key, span of value) of the object at ``pos``; the key without its quotes, escapes resolved where it has any."""
    pos = after_space(buf, pos + 1)
    if buf[pos : pos + 1] == b"}":
        return
    while True:
        key = _STRING.match(buf, pos)
        if key is None:
            raise InvalidJson(f"no key at byte {pos}")
        pos = after_space(buf, key.end())
        if buf[pos : pos + 1] != b":":
            raise InvalidJson(f"no colon at byte {pos}")
        start = after_space(buf, pos + 1)
        end = skip(buf, start)
        yield plain(key.group()), (start, end)
        pos = after_space(buf, end)
        closing = buf[pos : pos + 1]
        if closing == b"}":
            return
        if closing != b",":
            raise InvalidJson(f"no comma at byte {pos}")
        pos = after_space(buf, pos + 1)


def elements(buf: bytes, pos: int) -> Iterator[Span]:
    """Spans of the elements of the array at ``pos``."""
    pos = after_space(buf, pos + 1)
    if buf[pos : pos + 1] == b"]":
        return
    while True:
        end = skip(buf, pos)
        yield pos, end
        pos = after_space(buf, end)
        closing = buf[pos : pos + 1]
        if closing == b"]":
            return
        if closing != b",":
            raise InvalidJson(f"no comma at byte {pos}")
        pos = after_space(buf, pos + 1)


def tokens(buf: bytes, span: Span) -> tuple[list[bytes], list[int]]:
    """Elements of the array at ``span`` and where each starts; a flat array without spaces needs no walk."""
    inner = buf[span[0] + 1 : span[1] - 1]
    if not inner or _NOT_FLAT.search(inner):
        spans = list(elements(buf, span[0]))
        return [buf[start:end] for start, end in spans], [start for start, _ in spans]
    values = inner.split(b",")
    starts = accumulate(map(len, values[:-1]), lambda at, size: at + size + 1, initial=span[0] + 1)
    return values, list(starts)


def plain(quoted: bytes) -> bytes:
    """Content of a JSON string as UTF-8, escapes resolved."""
    if b"\\" not in quoted:
        return quoted[1:-1]
    text: str = loads(quoted)
    return text.encode("utf-8", "surrogatepass")


def splice(buf: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """``buf`` with each span replaced; edits do not overlap."""
    parts = []
    last = 0
    for start, end, new in sorted(edits, key=lambda edit: edit[:2]):
        parts.append(buf[last:start])
        parts.append(new)
        last = end
    parts.append(buf[last:])
    return b"".join(parts)
