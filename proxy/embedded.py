"""Runs an ASGI app as a real server inside the running event loop: for the demo. Shell."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn


@asynccontextmanager
async def run_app(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serves ``app`` on a free loopback port while the block runs; yields its base URL."""
    settings: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "log_config": None, "access_log": False}
    settings["timeout_graceful_shutdown"] = 1
    server = _Server(uvicorn.Config(app, **(settings | options)))
    task = asyncio.create_task(server.serve())
    ready = asyncio.create_task(server.ready.wait())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    try:
        if task.done():
            await task
            raise RuntimeError("the app refused to start")
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers (they belong to whoever runs the loop), telling when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def serve(self, sockets: Any = None) -> None:
        await self._serve(sockets)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready.set()
