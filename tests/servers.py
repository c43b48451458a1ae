"""Real servers on free loopback ports: an ASGI app inside the running event loop, the sidecar as its own process."""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from proxy.embedded import run_app

__all__ = ["run_app", "run_sidecar"]


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
