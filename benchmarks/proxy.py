"""The sidecar beside what people would use instead: ``python benchmarks/proxy.py [--only clean,streams,…]``.

Needs Linux, two cores, nginx, wrk and ``pip install logprob-sidecar[bench,test]``. Every round runs all proxies one
after the other, so that a busy machine slows all of them; ratios are taken within a round and printed with their range.
"""

import contextlib
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import sections
from rich.console import Console
from stack import LOAD_CORE, stack

HERE = Path(__file__).resolve().parent
SECTIONS: dict[str, Callable[..., Any]] = {
    "clean": sections.clean,
    "latency": sections.latency,
    "bad": sections.bad,
    "streams": sections.streamed,
    "mixed": sections.mixed,
    "loop": sections.loop,
    "inflight": sections.inflight,
    "clients": sections.clients,
    "workers": sections.workers,
}


@click.command()
@click.option("--only", default=",".join(SECTIONS), show_default=True, help="sections, separated by commas")
@click.option("--rounds", default=3, show_default=True, help="interleaved rounds of each section")
@click.option("--seconds", default=2, show_default=True, help="seconds of load a proxy, reply and round")
@click.option("--soak", default=0, help="seconds of mixed load to watch the resident memory for")
@click.option("--slow", default=20.0, show_default=True, help="seconds after which the requests in flight are answered")
@click.option("--niceness", default=0, help="niceness of all that is started; below 0 where others share the machine")
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "proxy.json", help="the numbers, as JSON")
@click.option("--plot", type=click.Path(path_type=Path), default=HERE / "proxy.png", help="the plot (extra: bench)")
def main(only: str, rounds: int, seconds: int, soak: int, slow: float, niceness: int, out: Path, plot: Path) -> None:
    """Runs the sections, prints their tables, writes the numbers and the plot."""
    names = [name for name in only.split(",") if name]
    if unknown := set(names) - set(SECTIONS):
        raise click.BadParameter(f"no such section: {', '.join(unknown)}", param_hint="--only")
    if (os.cpu_count() or 1) < 2:
        raise click.ClickException("two cores are needed: one for the proxy, one for load and upstream")
    if niceness:
        os.nice(niceness)
        with contextlib.suppress(OSError):  # Linux weighs sessions before it weighs processes: run under setsid
            Path("/proc/self/autogroup").write_text(str(niceness))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended then, too
    os.sched_setaffinity(0, {LOAD_CORE})
    options = sections.Options(rounds, seconds, slow)
    console = Console(width=150)
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    results["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "rounds": rounds}
    with stack() as run:
        for name in names:
            results[name] = SECTIONS[name](run, options, console)
            out.write_text(json.dumps(results, indent=1) + "\n")
        if soak:
            results["soak"] = sections.soak(run, soak, console)
            out.write_text(json.dumps(results, indent=1) + "\n")
    if "clean" in results and "latency" in results:
        try:
            from plot import draw
        except ModuleNotFoundError as error:
            console.print(f"no plot: {error} (pip install logprob-sidecar\\[bench])")
        else:
            draw(results, plot)
            console.print(f"plot: {plot}")


if __name__ == "__main__":
    main()
