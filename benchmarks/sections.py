"""The sections of the benchmark: each runs its proxies in interleaved rounds, prints a table, returns the numbers."""

import subprocess
import sys
import time

import flight
import replies
import streams
from load import percentile, probe, spread, start_wrk, wrk
from rich.console import Console
from rounds import Numbers, Options, added, compare, empty, new_table, note, ratios, stop
from stack import REPO, Process, Stack, free_port


def clean(run: Stack, options: Options, console: Console) -> Numbers:
    """Requests/s of every proxy at every size, and what they are of nginx's."""
    url = run.upstream.url
    proxies = [
        run.reverse_nginx(url), run.sidecar(url), run.vllm_router(url), run.rllm_gateway(url),
        run.naive("fastapi-httpx", url),
    ]  # fmt: skip
    out: Numbers = {}
    for size in replies.SIZES:
        out[str(size)] = compare(run, proxies, f"clean-{size}", options)
    stop(run, proxies)
    table = new_table(
        "Clean replies, 32 connections: requests/s and, below it, the share of nginx's", *map(str, replies.SIZES)
    )
    for process in proxies:
        name = process.name
        table.add_row(name, *(spread(out[size][name]["rate"], 0) for size in out))
        table.add_row("", *(spread(ratios(out[size], name, "nginx"), 3) for size in out), style="dim")
    console.print(table)
    table = new_table("The sidecar's requests/s as a multiple of", *map(str, replies.SIZES))
    for process in proxies:
        if process.name != "sidecar":
            table.add_row(process.name, *(spread(ratios(out[size], "sidecar", process.name)) for size in out))
    console.print(table)
    return out


def latency(run: Stack, options: Options, console: Console) -> Numbers:
    """Latency at concurrency 1 and the way it goes with more, upstream alone included."""
    url = run.upstream.url
    proxies = [run.upstream, run.reverse_nginx(url), run.sidecar(url), run.vllm_router(url)]
    out: Numbers = {}
    for size, connections in ((128, 1), (1024, 1), (8192, 1), (1024, 8), (1024, 128), (1024, 512)):
        key = f"{size}/{connections}"
        out[key] = compare(run, proxies, f"clean-{size}", options, connections=connections)
    stop(run, proxies[1:])
    table = new_table("Latency, ms: median and p99 at tokens/connections", *out)
    for process in proxies:
        name = process.name
        table.add_row(
            name, *(f"{spread(out[key][name]['p50'])} {percentile(out[key][name]['p99'], 0.5):.1f}" for key in out)
        )
    table.add_row("sidecar adds", *(spread(added(out[key], "sidecar", "upstream")) for key in out))
    console.print(table)
    return out


def bad(run: Stack, options: Options, console: Console) -> Numbers:
    """Replies with unscorable tokens, and the other layouts, beside clean ones of the same size."""
    sidecar = run.sidecar(run.upstream.url)
    names = [
        "clean-1024",
        "clean-rust-1024",
        *(f"{bad}-{share}-1024" for bad in replies.Bad for share in ("1in1000", "all")),
    ]
    out: Numbers = {name: empty() for name in names}
    chat: Numbers = empty()
    for _ in range(options.rounds):
        for name in names:
            run.serve_reply(name)
            note(out[name], wrk(sidecar, run.root, seconds=options.seconds))
        run.serve_reply("clean-chat-1024")
        load = wrk(sidecar, run.root, seconds=options.seconds, path="/v1/chat/completions", body=replies.CHAT_REQUEST)
        note(chat, load)
    out["clean-chat-1024"] = chat
    stop(run, [sidecar])
    table = new_table("The sidecar on 1,024 tokens", "requests/s", "of its clean rate", "CPU µs a request")
    for name, numbers in out.items():
        share = [a / b for a, b in zip(numbers["rate"], out["clean-1024"]["rate"], strict=True)]
        table.add_row(name, spread(numbers["rate"], 0), spread(share), spread([cpu * 1e6 for cpu in numbers["cpu"]], 0))
    console.print(table)
    return out


PACE = 0.05  # seconds a token


def streamed(run: Stack, options: Options, console: Console) -> Numbers:
    """Events of streams: rate, and time from the upstream's write to the client's read."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    direct = Process("upstream", port, run.upstream.popen)
    proxies = [direct, run.reverse_nginx(url), run.sidecar(url)]
    out: Numbers = {}
    for count in (1, 32, 256):
        measured: Numbers = {process.name: {} for process in proxies}
        events = max(40, int(options.seconds * 6000 / count))
        for _ in range(options.rounds):
            for process in proxies:
                result = streams.measure(process, port, count, events)
                for field in ("rate", "p50", "p99", "cpu", "lost"):
                    measured[process.name].setdefault(field, []).append(getattr(result, field))
                # Of streams that begin while others go on at the pace of an engine.
                begun = streams.measure(process, port, count, events=40, pace=PACE)
                measured[process.name].setdefault("first", []).append(begun.first)
        out[str(count)] = measured
    stop(run, proxies[1:])
    table = new_table(
        "Streams", "events/s", "of nginx's", "added ms p50", "p99", "first added ms", "CPU µs an event", "lost"
    )
    for count, measured in out.items():
        for name, numbers in measured.items():
            table.add_row(
                f"{name}, {count} streams", spread(numbers["rate"], 0), spread(ratios(measured, name, "nginx")),
                spread(added(measured, name, "upstream"), 3), spread(added(measured, name, "upstream", "p99"), 2),
                spread(added(measured, name, "upstream", "first"), 2),
                spread([cpu * 1e6 for cpu in numbers["cpu"]], 1), str(sum(numbers["lost"])),
            )  # fmt: skip
    console.print(table)
    return out


def mixed(run: Stack, options: Options, console: Console) -> Numbers:
    """Latency of 128-token replies while 32k-token replies (2.3 MB) pass."""
    url = run.upstream.url
    proxies = [run.reverse_nginx(url), run.sidecar(url), run.vllm_router(url)]
    kinds = {
        "idle": None,
        "beside clean 32k": f"clean-{replies.LONG}",
        "beside marked 32k": f"floor-1in1000-{replies.LONG}",
    }
    out: Numbers = {process.name: {kind: {"p50": [], "p99": [], "max": []} for kind in kinds} for process in proxies}
    for _ in range(options.rounds):
        for process in proxies:
            for kind, reply in kinds.items():
                load = reply and start_wrk(process, run.root, seconds=options.seconds + 1, connections=2, reply=reply)
                time.sleep(0.3)
                until, times = time.monotonic() + options.seconds, []
                while time.monotonic() < until:
                    times += probe(process, "clean-128", 20)
                if load:
                    load.communicate()
                numbers = out[process.name][kind]
                for field, value in (
                    ("p50", percentile(times, 0.5)),
                    ("p99", percentile(times, 0.99)),
                    ("max", max(times)),
                ):
                    numbers[field].append(value)
    stop(run, proxies)
    table = new_table("128-token replies, ms: median, p99", *kinds)
    for name, numbers in out.items():
        table.add_row(name, *(f"{spread(numbers[kind]['p50'])}, {spread(numbers[kind]['p99'])}" for kind in kinds))
    console.print(table)
    return out


def loop(run: Stack, options: Options, console: Console) -> Numbers:
    """How long one 32k-token reply keeps the event loop: timed in a process of its own, on the proxy's core."""
    names = [
        f"clean-{replies.LONG}",
        *(f"{bad}-{share}-{replies.LONG}" for bad in replies.Bad for share in ("1in1000", "all")),
    ]
    out: Numbers = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            command = ["taskset", "-c", "0", sys.executable, "-m", "benchmarks.busy", str(run.root / "replies" / name)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPO).stdout
            out[name].append(float(printed))
    table = new_table("One 32k-token reply, ms of CPU from body to body", "median of 9")
    for name, values in out.items():
        table.add_row(name, spread(values, 1))
    console.print(table)
    return out


def inflight(run: Stack, options: Options, console: Console) -> Numbers:
    """1,024 requests that are answered late: errors, and memory each."""
    port = free_port()
    out: Numbers = {}
    table = new_table(f"1,024 requests in flight, answered after {options.slow:g} s", "errors", "KiB each", "seconds")
    for make in (run.sidecar, run.reverse_nginx):
        process = make(f"http://127.0.0.1:{port}")
        result = flight.measure(process, port, 1024, options.slow)
        stop(run, [process])
        out[process.name] = {"errors": result.errors, "bytes": result.per_request, "seconds": result.seconds}
        table.add_row(process.name, str(result.errors), f"{result.per_request / 1024:.1f}", f"{result.seconds:.1f}")
    console.print(table)
    return out


def clients(run: Stack, options: Options, console: Console) -> Numbers:
    """The same byte scan behind general HTTP clients."""
    url = run.upstream.url
    proxies = [
        run.sidecar(url),
        run.naive("asgi-aiohttp", url),
        run.naive("asgi-httpx", url),
        run.naive("fastapi-httpx", url),
    ]
    out: Numbers = {str(size): compare(run, proxies, f"clean-{size}", options) for size in replies.SIZES}
    stop(run, proxies)
    table = new_table("HTTP clients: requests/s and, below it, the share of the sidecar's", *out)
    for process in proxies:
        name = process.name
        table.add_row(name, *(spread(out[size][name]["rate"], 0) for size in out))
        table.add_row("", *(spread(ratios(out[size], name, "sidecar"), 3) for size in out), style="dim")
    console.print(table)
    return out


def workers(run: Stack, options: Options, console: Console) -> Numbers:
    """One worker and two, free to run on both cores, which load and upstream share."""
    url = run.upstream.url
    proxies = [
        run.sidecar(url, f"--workers={n}", name=name, core="0,1") for n, name in ((1, "1 worker"), (2, "2 workers"))
    ]
    out: Numbers = {str(size): compare(run, proxies, f"clean-{size}", options) for size in replies.SIZES}
    stop(run, proxies)
    table = new_table("Workers: requests/s", *out)
    for process in proxies:
        table.add_row(process.name, *(spread(out[size][process.name]["rate"], 0) for size in out))
    table.add_row("2 over 1", *(spread(ratios(out[size], "2 workers", "1 worker")) for size in out))
    console.print(table)
    return out


def soak(run: Stack, seconds: int, console: Console) -> Numbers:
    """Resident memory under load that mixes sizes and unscorable tokens."""
    sidecar = run.sidecar(run.upstream.url)
    samples, until, errors = [], time.monotonic() + seconds, 0
    kinds = ["clean-128", "clean-1024", "floor-1in1000-1024", "clean-8192", f"clean-{replies.LONG}", "null-all-1024"]
    while time.monotonic() < until:
        for reply in kinds:
            errors += wrk(sidecar, run.root, seconds=2, reply=reply).errors
        samples.append(sidecar.resident())
    stop(run, [sidecar])
    early, late = samples[len(samples) // 10], samples[-1]
    table = new_table(f"Soak of {seconds} s", "MiB after a tenth", "at the end", "growth", "most", "errors")
    row = [
        f"{early / 2**20:.1f}",
        f"{late / 2**20:.1f}",
        f"{late / early - 1:+.1%}",
        f"{max(samples) / 2**20:.1f}",
        str(errors),
    ]
    table.add_row("sidecar", *row)
    console.print(table)
    return {"resident": samples, "errors": errors}
