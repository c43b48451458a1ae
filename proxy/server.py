"""Runs the app under uvicorn: the ready line, the drain, the workers. Shell."""

import asyncio
import math
import multiprocessing
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import uvicorn

from proxy.app import App, create_app
from proxy.http import Protocol
from proxy.memory import keep_memory
from proxy.settings import Settings

# Longer than clients keep idle connections, so that they, not we, close them: no request meets a closing socket.
_KEEP_ALIVE = 75
_BACKLOG = 4096
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT, drains, returns the exit code."""
    _raise_file_limit()
    listener = _listen(settings)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    line = f"logprob-sidecar on {url} in front of {settings.upstream}"
    if settings.workers == 1:
        return _Server(settings, listener, lambda: print(line, flush=True)).run_once()
    # Until each process can handle them: a signal that came earlier would leave workers without a supervisor.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    told, tell = os.pipe()
    processes = _start_workers(settings, listener, tell)
    listener.close()  # held open here, it would let clients connect to nobody while the workers drain
    return _supervise(processes, told, f"{line}, {settings.workers} workers")


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready and exits 0 after a drain, where uvicorn would die of the signal."""

    def __init__(self, settings: Settings, listener: socket.socket, ready: Callable[[], object]) -> None:
        self._app: App = create_app(settings)
        self._listener = listener
        self._ready = ready
        config = uvicorn.Config(
            self._app,
            loop="uvloop",
            http=Protocol,
            ws="none",
            proxy_headers=False,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(settings.drain_timeout),
            log_level=settings.log_level,
            backlog=_BACKLOG,
        )
        super().__init__(config)

    def run_once(self) -> int:
        keep_memory()
        self.run(sockets=[self._listener])
        return 0 if self.started else 1

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        for number in _SIGNALS:
            signal.signal(number, self._drain)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        yield

    def _drain(self, number: int, frame: object) -> None:
        self._app.sidecar.draining = True
        self.handle_exit(number, None)  # a second SIGINT ends the drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
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


def _start_workers(settings: Settings, listener: socket.socket, tell: int) -> list[BaseProcess]:
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    for _ in range(settings.workers):
        process = context.Process(target=_work, args=(settings, listener, tell))
        process.start()
        processes.append(process)
    return processes


def _work(settings: Settings, listener: socket.socket, tell: int) -> None:
    sys.exit(_Server(settings, listener, lambda: os.write(tell, b".")).run_once())


def _supervise(processes: list[BaseProcess], told: int, line: str) -> int:
    """Says ``line`` when each worker has told that it serves, hands signals on, returns the exit code.

    When one worker dies by itself the others are ended: a supervisor restarts the whole.
    """

    async def wait() -> int:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end(code: int) -> None:
            if not ended.done():
                ended.set_result(code)

        def ready() -> None:
            serving.extend(os.read(told, len(processes)))
            if len(serving) == len(processes):
                loop.remove_reader(told)
                print(line, flush=True)

        serving = bytearray()
        loop.add_reader(told, ready)
        for number in _SIGNALS:
            loop.add_signal_handler(number, end, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for process in processes:
            loop.add_reader(process.sentinel, end, 1)
        code: int = await ended
        for process in processes:
            loop.remove_reader(process.sentinel)
            process.terminate()
        await asyncio.gather(*(asyncio.to_thread(process.join) for process in processes))
        return code or int(any(process.exitcode for process in processes))

    return asyncio.run(wait())
