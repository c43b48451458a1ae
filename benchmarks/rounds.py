"""What every section does: interleaved rounds, ratios within a round, a table."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from load import Sample, wrk
from rich.table import Table
from stack import Process, Stack

Numbers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int
    seconds: int
    slow: float


def compare(run: Stack, proxies: list[Process], reply: str, options: Options, connections: int = 32) -> Numbers:
    """Interleaved rounds of one reply through every proxy."""
    run.serve_reply(reply)
    out: Numbers = {process.name: empty() for process in proxies}
    for process in proxies:  # warm connections, and a check that it is the reply that comes
        wrk(process, run.root, seconds=1, connections=connections)
    for _ in range(options.rounds):
        for process in proxies:
            with alone(process, [other for other in proxies if other is not run.upstream]):
                note(out[process.name], wrk(process, run.root, seconds=options.seconds, connections=connections))
    return out


@contextlib.contextmanager
def alone(process: Process, proxies: list[Process]) -> Iterator[None]:
    """The others stand still: some go on working when their load has ended (a gateway writes its traces)."""
    others = [other for other in proxies if other is not process]
    for other in others:
        os.killpg(other.popen.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            os.killpg(other.popen.pid, signal.SIGCONT)


def empty() -> Numbers:
    return {"rate": [], "p50": [], "p99": [], "cpu": [], "errors": []}


def note(numbers: Numbers, sample: Sample) -> None:
    for field in numbers:
        numbers[field].append(getattr(sample, field))


def ratios(measured: Numbers, name: str, of: str) -> list[float]:
    return [a / (b or 1e-9) for a, b in zip(measured[name]["rate"], measured[of]["rate"], strict=True)]


def added(measured: Numbers, name: str, to: str, field: str = "p50") -> list[float]:
    return [a - b for a, b in zip(measured[name][field], measured[to][field], strict=True)]


def stop(run: Stack, processes: list[Process]) -> None:
    for process in processes:
        run.stop(process)


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table
