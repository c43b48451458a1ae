"""uvicorn's HTTP protocol, sending the head of a reply together with its body: one packet and one system call. Shell.

uvicorn writes the head on its own; on the way to a waiting client that costs as much as all the sidecar's looking does.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Up to here copying head and body together is cheaper than handing the kernel two pieces.
_SMALL = 1 << 14


class Protocol(HttpToolsProtocol):
    """For ``uvicorn.Config(http=…)``."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Together(transport))  # type: ignore[arg-type]


class _Together:
    """A transport that holds a reply's head back until the next write, at most to the end of this turn of the loop."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: bytes | None = None
        self._loop = asyncio.get_running_loop()
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.set_protocol = transport.set_protocol

    def write(self, data: bytes) -> None:
        held = self._held
        if held is not None:
            self._held = None
            if len(data) < _SMALL:
                self._transport.write(held + data)
            else:
                self._transport.writelines([held, data])
        elif data.startswith(b"HTTP/1.1 "):
            self._held = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._held = None
        self._transport.abort()

    def _flush(self) -> None:
        held = self._held
        if held is not None:
            self._held = None
            self._transport.write(held)
