"""Real servers on free loopback ports: an ASGI app inside the running event loop, the sidecar as its own process."""

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn


@asynccontextmanager
async def run_app(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serves `app` on a free port while the block runs; yields its base URL, such as `http://127.0.0.1:40123`."""
    settings = {"host": "127.0.0.1", "port": 0, "log_config": None, "access_log": False, "timeout_graceful_shutdown": 1}
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


@contextmanager
def run_sidecar(upstream: str, **settings: object) -> Iterator[str]:
    """`logprob-sidecar serve` as a user starts it: `run_sidecar(url, nan_encoding="null")`; yields its base URL."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "proxy", "serve", "--upstream", upstream, "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            # The one line that `serve` prints when it is ready; the end of the output where it never is.
            ready = re.search(r"http://\S+", process.stdout.readline())
            if ready is None:
                process.kill()
                log.seek(0)
                raise RuntimeError(f"the sidecar ended with {process.wait()} before it was ready:\n{log.read()}")
            yield ready.group().rstrip("/.")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    assert process.returncode == 0, "a drained sidecar exits 0"


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers (they belong to pytest), telling when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def serve(self, sockets: Any = None) -> None:
        await self._serve(sockets)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready.set()
