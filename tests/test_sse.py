"""Server-sent events: WHATWG's rules, on bytes, at any split."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.sse import Frame, Parser

CASES = {
    "lf": (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
    "crlf": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "cr": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "mixed": (b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"]),
    "no space": (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
    "several data lines": (b"data: {\ndata: }\n\n", [b"{\n}"]),
    "empty data": (b"data\n\ndata:\n\n", [b"", b""]),
    "comment": (b": keep-alive\n\ndata: a\n\n", [None, b"a"]),
    "comment inside": (b"data: a\n: note\n\n", [b"a"]),
    "event and id": (b"event: x\nid: 7\ndata: a\nretry: 3\n\n", [b"a"]),
    "other fields": (b"database: a\n\ndata: b\n\n", [None, b"b"]),
    "unicode line separators end no line": ("data: a\u2028b\u0085c\n\n".encode(), ["a\u2028b\u0085c".encode()]),
    "leading newlines": (b"\n\ndata: a\n\n", [None, b"a"]),
}


def run(parser: Parser, chunks: list[bytes]) -> list[Frame]:
    return [frame for chunk in chunks for frame in parser.feed(chunk)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split", ["whole", "bytes", "everywhere"])
def test_frames_and_bytes_survive_any_split(name: str, split: str) -> None:
    raw, expected = CASES[name]
    splits = {
        "whole": [[raw]],
        "bytes": [[raw[i : i + 1] for i in range(len(raw))]],
        "everywhere": [[raw[:i], raw[i:]] for i in range(len(raw) + 1)],
    }[split]
    for chunks in splits:
        parser = Parser()
        frames = run(parser, chunks)
        assert b"".join(frame.raw for frame in frames) + b"".join(f.raw for f in parser.close()) == raw
        assert [frame.data for frame in frames if frame.data is not None] == [d for d in expected if d is not None]
        assert all(frame.ended for frame in frames)


@given(
    st.lists(st.sampled_from([b"data: x", b"\n", b"\r", b"\r\n", b":c", b"event: e", b"data", b"\n\n"]), max_size=30),
    st.randoms(),
)
def test_any_bytes_leave_as_they_came(pieces: list[bytes], chance: random.Random) -> None:
    raw = b"".join(pieces)
    parser = Parser()
    out = b""
    at = 0
    while at < len(raw):
        size = chance.randint(1, 9)
        out += b"".join(frame.raw for frame in parser.feed(raw[at : at + size]))
        at += size
    assert out + b"".join(frame.raw for frame in parser.close()) == raw


def test_an_event_leaves_as_soon_as_its_empty_line_is_there() -> None:
    parser = Parser()
    assert parser.feed(b"data: a\n") == []
    assert [frame.data for frame in parser.feed(b"\n")] == [b"a"]
    assert [frame.data for frame in parser.feed(b"data: b\r\n\r")] == [b"b"]


def test_what_a_cut_stream_leaves_is_no_whole_event() -> None:
    parser = Parser()
    parser.feed(b"data: a\n\ndata: {unfinis")
    assert parser.close() == [Frame(b"data: {unfinis", b"{unfinis", ended=False)]
    assert parser.close() == []


def test_other_data_keeps_every_other_line() -> None:
    [frame] = Parser().feed(b"event: x\r\ndata: a\r\n: note\r\nid: 7\r\n\r\n")
    assert frame.with_data(b"b") == b"event: x\r\ndata: b\r\n: note\r\nid: 7\r\n\r\n"
    [frame] = Parser().feed(b"data: {\ndata: }\n\n")
    assert frame.with_data(b"{\n1}") == b"data: {\ndata: 1}\n\n"
    [frame] = Parser().feed(b"data:a\n\n")
    assert frame.with_data(b"b") == b"data: b\n\n"


def test_a_slow_trickle_of_one_long_line_is_linear() -> None:
    """Searched once: a parser that starts over at each chunk would look at 50 GB here."""
    parser = Parser()
    for _ in range(100_000):
        assert parser.feed(b"0123456789") == []
    [frame] = parser.feed(b"\n\n")
    assert len(frame.raw) == 1_000_002
