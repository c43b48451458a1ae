"""The head of a reply leaves with its body, and no later than the end of the loop's turn."""

import asyncio
from typing import Any

import pytest

from proxy.http import _Together

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Transport:
    """Notes what a transport is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.told.append((name, *args))


@pytest.mark.anyio
async def test_head_and_small_body_are_one_write() -> None:
    transport = Transport()
    together = _Together(transport)
    together.write(HEAD)
    together.write(b"{}")
    await asyncio.sleep(0)
    assert transport.told == [("write", HEAD + b"{}")]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [bytes, bytearray])
async def test_a_large_body_is_not_copied(kind: type) -> None:
    transport, body = Transport(), kind(1 << 20)
    together = _Together(transport)
    together.write(HEAD)
    together.write(body)
    assert transport.told == [("writelines", [HEAD, body])]
    assert transport.told[0][1][1] is body


@pytest.mark.anyio
async def test_a_head_alone_leaves_with_the_turn_of_the_loop() -> None:
    transport = Transport()
    together = _Together(transport)
    together.write(HEAD)
    assert transport.told == []
    await asyncio.sleep(0)
    assert transport.told == [("write", HEAD)]
    together.write(b"2\r\n{}\r\n")
    together.write(b"0\r\n\r\n")
    await asyncio.sleep(0)
    assert transport.told[1:] == [("write", b"2\r\n{}\r\n"), ("write", b"0\r\n\r\n")]


@pytest.mark.anyio
async def test_closing_sends_the_head_first_and_aborting_drops_it() -> None:
    transport = Transport()
    together = _Together(transport)
    together.write(HEAD)
    together.close()
    assert transport.told == [("write", HEAD), ("close",)]
    together.write(HEAD)
    together.abort()
    await asyncio.sleep(0)
    assert transport.told[2:] == [("abort",)]
