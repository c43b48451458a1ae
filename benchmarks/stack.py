"""What a benchmark run starts: the upstream, the proxies under test, each pinned to a core. All are stopped by pid."""

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import replies

REPO = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "logprob-sidecar" / "peers"
PROXY_CORE, LOAD_CORE = 0, 1

_NGINX = """
worker_processes 1; daemon off; pid {root}/{name}.pid; error_log {root}/{name}.log crit;
events {{ worker_connections 16384; }}
http {{
  access_log off; sendfile on; tcp_nopush on; tcp_nodelay on; keepalive_requests 1000000000; keepalive_timeout 600s;
  client_max_body_size 0; client_body_buffer_size 1m; default_type application/json;
  client_body_temp_path {root}/{name}-body; proxy_temp_path {root}/{name}-proxy;
  fastcgi_temp_path {root}/{name}-f; uwsgi_temp_path {root}/{name}-u; scgi_temp_path {root}/{name}-s;
  {inside}
}}
"""
# Any POST to a generation route gets the file that X-Reply names, or whatever the link "current" leads to.
_UPSTREAM = """
  map $http_x_reply $reply {{ default current; "~^[a-z0-9-]+$" $http_x_reply; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096; root {root};
    location /replies/ {{ }}
    location /v1/completions {{ error_page 418 =200 /replies/$reply; return 418; }}
    location /v1/chat/completions {{ error_page 418 =200 /replies/$reply; return 418; }}
    location / {{ return 200 '{{}}'; }}
  }}
"""
_REVERSE = """
  upstream up {{ server {upstream}; keepalive 2048; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_read_timeout 600s;
      proxy_buffers 64 16k; proxy_buffer_size 16k; proxy_busy_buffers_size 256k; proxy_max_temp_file_size 0;
    }}
  }}
"""


@dataclass(slots=True)
class Process:
    """A process group under test or beside it."""

    name: str
    port: int
    popen: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pids(self) -> list[int]:
        """The process and its children, grandchildren included."""
        found, todo = [], [self.popen.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    todo += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        return found

    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far."""
        ticks = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def resident(self) -> int:
        """Bytes of resident memory."""
        pages = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Stack:
    """The directory and the processes of one run."""

    root: Path
    upstream: Process = field(init=False)
    running: list[Process] = field(default_factory=list)

    def start(self, name: str, command: list[str], port: int, core: int | str = PROXY_CORE) -> Process:
        """Starts ``command`` on ``core`` and waits until ``port`` takes connections."""
        log = (self.root / f"{name}.out").open("wb")
        popen = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            cwd=REPO, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        process = Process(name, port, popen)
        self.running.append(process)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return process
            if popen.poll() is not None or time.monotonic() > deadline:
                tail = (self.root / f"{name}.out").read_text(errors="replace")[-2000:]
                raise SystemExit(f"{name} did not start:\n{tail}")
            time.sleep(0.05)

    def stop(self, process: Process) -> None:
        self.running.remove(process)
        process.popen.send_signal(signal.SIGTERM)
        try:
            process.popen.wait(15)
        except subprocess.TimeoutExpired:
            for pid in process.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.popen.wait()

    def nginx(self, name: str, inside: str, port: int, core: int) -> Process:
        conf = self.root / f"{name}.conf"
        conf.write_text(_NGINX.format(root=self.root, name=name, inside=inside))
        return self.start(name, [_nginx(), "-c", str(conf), "-e", str(self.root / f"{name}.log")], port, core)

    def serve_reply(self, name: str) -> None:
        """What the upstream answers from now on where no X-Reply says otherwise."""
        link = self.root / "replies" / "current.new"
        link.symlink_to(name)
        link.replace(self.root / "replies" / "current")

    def sidecar(self, upstream: str, *options: str, name: str = "sidecar", core: int | str = PROXY_CORE) -> Process:
        # The breaker is off: a benchmark of bad replies would trip it, which is what it is for.
        port = free_port()
        command = [sys.executable, "-m", "proxy", "serve", "--upstream", upstream, "--port", str(port)]
        return self.start(name, [*command, "--trip-ratio=0", *options], port, core)

    def reverse_nginx(self, upstream: str) -> Process:
        port = free_port()
        inside = _REVERSE.format(upstream=upstream.removeprefix("http://"), port=port)
        return self.nginx("nginx", inside, port, PROXY_CORE)

    def naive(self, client: str, upstream: str) -> Process:
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.naive", client, upstream, str(port)]
        return self.start(client, command, port)

    def vllm_router(self, upstream: str) -> Process:
        port = free_port()
        command = [
            peer("vllm-router", "0.1.17"), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", upstream,
            "--prometheus-port", str(free_port()), "--policy", "round_robin", "--log-level", "error",
        ]  # fmt: skip
        return self.start("vllm-router", command, port)

    def rllm_gateway(self, upstream: str) -> Process:
        port = free_port()
        command = [
            peer("rllm-model-gateway", "0.1.0"), "--host", "127.0.0.1", "--port", str(port), "--worker", upstream,
            "--db-path", str(self.root / "traces.db"), "--log-level", "error",
        ]  # fmt: skip
        return self.start("rllm-gateway", command, port)


@contextlib.contextmanager
def stack() -> Iterator[Stack]:
    """A running upstream; everything that was started is ended with the block."""
    with tempfile.TemporaryDirectory(prefix="sidecar-bench-") as directory:
        root = Path(directory)
        root.chmod(0o755)  # nginx serves as another user
        (root / "replies").mkdir()
        for name, make in replies.named().items():
            (root / "replies" / name).write_bytes(make())
        (root / "replies" / "current").symlink_to("clean-128")
        run = Stack(root)
        try:
            port = free_port()
            run.upstream = run.nginx("upstream", _UPSTREAM.format(root=root, port=port), port, LOAD_CORE)
            yield run
        finally:
            for process in reversed(list(run.running)):
                run.stop(process)


def peer(package: str, version: str) -> str:
    """The command of a package from PyPI, in a virtual environment of its own."""
    home = CACHE / f"{package}-{version}"
    command = home / "bin" / package
    if not command.exists():
        print(f"installing {package} {version} into {home} …", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run([home / "bin" / "pip", "install", "--quiet", f"{package}=={version}"], check=True)
    return str(command)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def post(port: int, reply: str, path: str = "/v1/completions", body: bytes = replies.REQUEST) -> tuple[int, bytes]:
    """(status, body) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, body, {"Content-Type": "application/json", "X-Reply": reply})
    response = connection.getresponse()
    return response.status, response.read()


def _nginx() -> str:
    for place in (shutil.which("nginx"), "/usr/sbin/nginx"):
        if place and Path(place).exists():
            return place
    raise SystemExit("nginx is missing: apt-get install nginx-light wrk")
