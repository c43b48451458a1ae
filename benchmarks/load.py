"""wrk as load, and a serial probe for latency. Both run on the load's core."""

import http.client
import json
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import replies
from stack import LOAD_CORE, Process

# What is measured must not be what wrk prints rounded.
_LUA = """
wrk.method = "POST"
wrk.body = %s
wrk.headers["Content-Type"] = "application/json"
%s
done = function(s, l, r)
  local e = s.errors
  io.write(string.format('\\n{"requests":%%d,"us":%%d,"bytes":%%d,"errors":%%d,"p50":%%d,"p99":%%d}\\n', s.requests,
    s.duration, s.bytes, e.connect + e.read + e.write + e.status + e.timeout, l:percentile(50), l:percentile(99)))
end
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of wrk. ``rate``: requests/s; ``cpu``: seconds of the proxy's CPU time a request; latencies in ms."""

    rate: float
    p50: float
    p99: float
    cpu: float
    errors: int


def wrk(
    process: Process,
    root: Path,
    *,
    seconds: int = 2,
    connections: int = 32,
    reply: str | None = None,
    path: str = "/v1/completions",
    body: bytes = replies.REQUEST,
) -> Sample:
    """Loads ``process`` for ``seconds``; ``reply`` is asked for by header where it is not the current one."""
    before = process.cpu_seconds()
    with start_wrk(
        process, root, seconds=seconds, connections=connections, reply=reply, path=path, body=body
    ) as running:
        out, _ = running.communicate()
    result = json.loads(out.decode().rstrip().rpartition("\n")[2])
    requests = max(1, result["requests"])
    cpu = (process.cpu_seconds() - before) / requests
    rate = result["requests"] / (result["us"] / 1e6)
    return Sample(rate, result["p50"] / 1e3, result["p99"] / 1e3, cpu, result["errors"])


def start_wrk(
    process: Process,
    root: Path,
    *,
    seconds: int,
    connections: int,
    reply: str | None = None,
    path: str = "/v1/completions",
    body: bytes = replies.REQUEST,
) -> "subprocess.Popen[bytes]":
    script = root / f"load-{time.monotonic_ns()}.lua"
    quoted = json.dumps(body.decode())
    script.write_text(_LUA % (quoted, f'wrk.headers["X-Reply"] = "{reply}"' if reply else ""))
    command = ["taskset", "-c", str(LOAD_CORE), "wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "60s"]
    return subprocess.Popen([*command, "-s", str(script), process.url + path], stdout=subprocess.PIPE)


def probe(process: Process, reply: str, count: int, pause: float = 0.0) -> list[float]:
    """Milliseconds of ``count`` requests, one after the other on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=60)
    headers = {"Content-Type": "application/json", "X-Reply": reply}
    times = []
    for _ in range(count):
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", replies.REQUEST, headers)
        response = connection.getresponse()
        response.read()
        times.append((time.perf_counter() - began) * 1e3)
        assert response.status == 200, response.status
        if pause:
            time.sleep(pause)
    connection.close()
    return times


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: list[float], digits: int = 2) -> str:
    """Median and range over the rounds."""
    middle = statistics.median(values)
    if len(values) == 1:
        return f"{middle:,.{digits}f}"
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"
