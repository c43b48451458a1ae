"""Server-sent events from bytes at any split (WHATWG HTML, 9.2.6). Core: ``feed`` bytes, get frames, ``close``.

Works on bytes, never on decoded lines: U+2028 and U+0085 end no line here. A frame keeps its raw bytes, so that what is
not rewritten leaves as it came, comments and unknown fields included.
"""

import re
from dataclasses import dataclass

# An event ends at an empty line; CR, LF and CRLF end lines, also mixed. Atomic: a CRLF is never read as CR and LF.
_END_OF_EVENT = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
_LINE = re.compile(rb"([^\r\n]*)(?:\r\n|\r|\n|$)")


@dataclass(frozen=True, slots=True)
class Frame:
    """One event (or comments alone) with its terminator.

    ``data``: its data lines joined by LF, None if it has none. ``ended``: False for what a cut stream left.
    """

    raw: bytes
    data: bytes | None
    ended: bool = True

    def with_data(self, data: bytes) -> bytes:
        """The frame's bytes with other data; every other line as it came."""
        out = []
        written = False
        for match in _LINE.finditer(self.raw):
            if not match.group():
                continue
            if _data(match.group(1)) is None:
                out.append(match.group())
            elif not written:
                written = True
                ending = match.group()[len(match.group(1)) :] or b"\n"
                out.extend(b"data: " + line + ending for line in data.split(b"\n"))
        return b"".join(out)


class Parser:
    """Cuts a byte stream into frames; remembers how far it has searched, so that a slow trickle stays linear."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0

    def feed(self, chunk: bytes) -> list[Frame]:
        if not self._rest and _is_plain(chunk):
            return [Frame(chunk, chunk[6:-2])]
        self._rest += chunk
        frames = []
        start = 0
        while (end := _END_OF_EVENT.search(self._rest, max(start, self._searched))) is not None:
            frames.append(_frame(bytes(self._rest[start : end.end()])))
            start = self._searched = end.end()
        del self._rest[:start]
        self._searched = max(0, len(self._rest) - 3)
        return frames

    def close(self) -> list[Frame]:
        """What never got its empty line."""
        rest, self._rest, self._searched = bytes(self._rest), bytearray(), 0
        return [Frame(rest, _frame(rest).data, ended=False)] if rest else []


def _is_plain(raw: bytes) -> bool:
    """One whole event as vLLM writes it: one line of data."""
    return raw.startswith(b"data: ") and raw.endswith(b"\n\n") and raw.count(b"\n") == 2 and b"\r" not in raw


def _frame(raw: bytes) -> Frame:
    if _is_plain(raw):
        return Frame(raw, raw[6:-2])
    lines = [_data(match.group(1)) for match in _LINE.finditer(raw)]
    data = [line for line in lines if line is not None]
    return Frame(raw, b"\n".join(data) if data else None)


def _data(line: bytes) -> bytes | None:
    if line == b"data":
        return b""
    if not line.startswith(b"data:"):
        return None
    return line[6:] if line.startswith(b"data: ") else line[5:]
