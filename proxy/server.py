"""Runs the app under uvicorn: the ready line, the drain, the workers. Shell."""

import asyncio
import multiprocessing
import resource
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import uvicorn

from proxy.app import App, create_app
from proxy.settings import Settings

# Longer than clients keep idle connections, so that they, not we, close them: no request meets a closing socket.
_KEEP_ALIVE = 75


def serve(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT, drains, returns the exit code."""
    _raise_file_limit()
    listener = _listen(settings)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if settings.workers == 1:
        return _Server(settings, listener, f"logprob-sidecar on {url} in front of {settings.upstream}").run_once()
    processes = _start_workers(settings, listener)
    print(f"logprob-sidecar on {url} in front of {settings.upstream}, {settings.workers} workers", flush=True)
    return _supervise(processes)


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready and exits 0 after a drain, where uvicorn would die of the signal."""

    def __init__(self, settings: Settings, listener: socket.socket, ready: str | None) -> None:
        self._app: App = create_app(settings)
        self._listener = listener
        self._ready = ready
        config = uvicorn.Config(
            self._app,
            loop="uvloop",
            http="httptools",
            ws="none",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=int(settings.drain_timeout) or None,
            log_level=settings.log_level,
            backlog=4096,
        )
        super().__init__(config)

    def run_once(self) -> int:
        self.run(sockets=[self._listener])
        return 0 if self.started else 1

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._drain)
        yield

    def _drain(self, number: int, frame: object) -> None:
        self._app.sidecar.draining = True
        self.handle_exit(signal.SIGTERM, None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._ready is not None:
            print(self._ready, flush=True)


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        sys.exit(
            f"logprob-sidecar: cannot listen on {settings.host}:{settings.port} (--host, --port): {error.strerror}"
        )
    listener.set_inheritable(True)
    return listener


def _raise_file_limit() -> None:
    """Every request in flight holds two sockets, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _start_workers(settings: Settings, listener: socket.socket) -> list[BaseProcess]:
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    for _ in range(settings.workers):
        process = context.Process(target=_work, args=(settings, listener))
        process.start()
        processes.append(process)
    return processes


def _work(settings: Settings, listener: socket.socket) -> None:
    sys.exit(_Server(settings, listener, None).run_once())


def _supervise(processes: list[BaseProcess]) -> int:
    """Hands the signal on; when one worker dies by itself the others are ended: a supervisor restarts the whole."""

    async def wait() -> int:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end(code: int) -> None:
            if not ended.done():
                ended.set_result(code)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end, 0)
        for process in processes:
            loop.add_reader(process.sentinel, end, 1)
        code: int = await ended
        for process in processes:
            loop.remove_reader(process.sentinel)
            process.terminate()
        await asyncio.gather(*(asyncio.to_thread(process.join) for process in processes))
        return code or int(any(process.exitcode for process in processes))

    return asyncio.run(wait())
