"""Runs arms of the proof: engines, sidecars and trainers as processes on free loopback ports.

The trainer runs in TRL's own environment. Every process started here is ended by its id or its group.
"""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import proof_batch
import proof_notes
import proof_records
from proof_arms import MISSING_RATE, Arm, Engine, Run
from proof_records import Answer, Job

HERE = Path(__file__).resolve().parent
# Before this folder, whose proxy.py would hide the package; tests/ builds and boots the real vLLM and TRL.
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

import trl_env  # noqa: E402
import vllm_env  # noqa: E402
from servers import run_sidecar  # noqa: E402

START_S = 240.0
"""How long a trainer's imports, and the comparison after its last step, may take together."""

Batch = Sequence[dict[str, Any]]
MAX_TOKENS = 12


class Engines:
    """Boots each engine when it is first asked for, several at once, and keeps it until the end."""

    def __init__(self) -> None:
        self._running = contextlib.ExitStack()
        self._urls: dict[Engine, str] = {}
        folder = self._running.enter_context(tempfile.TemporaryDirectory())
        self.weights_file = Path(folder) / "weights.safetensors"

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_error: object) -> None:
        self._running.close()

    def lend(self, engine: Engine, url: str) -> None:
        """Use a server that somebody else boots and stops."""
        self._urls[engine] = url

    def boot(self, engines: Sequence[Engine]) -> None:
        absent = [engine for engine in dict.fromkeys(engines) if engine not in self._urls]
        with ThreadPoolExecutor() as pool:  # most of a boot is imports on one core
            started = pool.map(lambda engine: self._running.enter_context(self._run(engine)), absent)
            self._urls |= dict(zip(absent, started, strict=True))

    def url(self, engine: Engine) -> str:
        self.boot([engine])
        return self._urls[engine]

    @contextlib.contextmanager
    def _run(self, engine: Engine) -> Iterator[str]:
        if engine is Engine.MISSING:
            with _run_simulator() as url:
                yield url
            return
        options: dict[str, Any] = {"front_end": "rust" if engine is Engine.RUST else "python"}
        if engine is Engine.SYNCED:
            options["flags"] = ("--weight-transfer-config", '{"backend": "file"}')
            options["env"] = {"WEIGHTS_FILE": str(self.weights_file)}
            options["command_file"] = "vllm_file_cli.py"
        model = vllm_env.ensure_model(poisoned=engine is not Engine.CLEAN)
        with vllm_env.run_vllm(model, **options) as server:
            yield server.url


@contextlib.contextmanager
def _run_simulator() -> Iterator[str]:
    rates = ("--nan-rate=0", f"--missing-rate={MISSING_RATE}")
    command = [sys.executable, "-m", "proxy", "simulate", "--port=0", f"--model={vllm_env.SERVED_NAME}", *rates]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=HERE.parent)
    try:
        assert process.stdout is not None
        ready = re.search(r"http://\S+", process.stdout.readline())
        if ready is None:
            raise RuntimeError(f"the simulator ended with {process.wait()} before it was ready")
        yield ready.group()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def take_fixed_batch(engines: Engines) -> Batch:
    with run_sidecar(engines.url(Engine.POISONED), trip_ratio=0, nan_encoding="literal") as sidecar:
        return proof_batch.take(sidecar)


def run_arm(arm: Arm, engines: Engines, steps: int, fixed_batch: Batch = (), max_tokens: int = MAX_TOKENS) -> Run:
    """Train for `steps` steps on completions of `max_tokens`, or until the arm's time is up."""
    upstream, wanted = engines.url(arm.engine), arm.steps or steps
    job = Job(
        model=str(trl_env.ensure_model()),
        url=upstream,
        steps=wanted,
        hook=arm.hook,
        mark=arm.mark,
        fixed_batch=list(fixed_batch),
        cut_off_s=arm.cut_off_s,
        served_name=vllm_env.SERVED_NAME,
        max_tokens=max_tokens,
        weights_file=str(engines.weights_file) if arm.engine is Engine.SYNCED else None,
    )
    if arm.sidecar is None:
        return Run(arm, wanted, *_train(arm, job))
    with run_sidecar(upstream, **arm.sidecar) as sidecar:
        record, traffic = _train(arm, dataclasses.replace(job, url=sidecar))
        return Run(arm, wanted, record, traffic, counters(sidecar), health(sidecar))


def _train(arm: Arm, job: Job) -> tuple[Answer, proof_notes.Traffic]:
    with tempfile.TemporaryDirectory() as scratch:
        question, answer, notes = (Path(scratch) / name for name in ("job.json", "answer.json", "notes.jsonl"))
        proof_records.write(job, question)
        _call(
            [str(trl_env.ensure_env()), str(HERE / arm.trainer), str(question), str(answer)],
            trl_env.environment() | {proof_notes.FILE: str(notes)},
            timeout=arm.cut_off_s + START_S,
        )
        return proof_records.read_answer(answer), proof_notes.read(notes)


def _call(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> None:
    """Run a process to its end; whatever it has started is gone with it."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=tempfile.gettempdir(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{command[1]} ended with {process.returncode}:\n{log.read()[-6000:]}")


def counters(sidecar: str) -> dict[str, float]:
    """Those that are not zero, as Prometheus writes them."""
    with urllib.request.urlopen(f"{sidecar}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    pairs = [line.removeprefix("logprob_sidecar_").rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs if "_total" in name and float(value)}


def health(sidecar: str) -> int:
    try:
        with urllib.request.urlopen(f"{sidecar}/health", timeout=60) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
