"""A real TRL for the tests: its environment, built once in a cache outside the checkout, and scripts run in it.

Standard library only, so that `python tests/trl_env.py` builds everything ahead of a test run. Nothing of TRL or torch
is imported here: they live in the other environment and are reached as processes.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vllm_env

TRL = "1.16.0"
TORCH = "2.13.0"
RUN_TIMEOUT_S = 850.0

_HERE = Path(__file__).parent
_REQUIREMENTS = (f"torch=={TORCH}", f"trl=={TRL}", "aiohttp", "requests")  # the last two: TRL's rollout worker


def ensure_env() -> Path:
    """The Python of an environment with TRL's trainers, built when it is absent or incomplete."""
    env = vllm_env.cache_dir() / f"trl-{TRL}"
    with vllm_env._locked(env.with_suffix(".lock")):
        stamp = env / "logprob-sidecar.json"
        if not stamp.exists() or json.loads(stamp.read_text()) != list(_REQUIREMENTS):
            if not _is_complete(env):
                _build(env)
            stamp.write_text(json.dumps(_REQUIREMENTS))
    return env / "bin" / "python"


def ensure_model() -> Path:
    """The folder of the tiny model that never yields NaN, made when absent."""
    return vllm_env.ensure_model(poisoned=False, python=ensure_env())


def environment() -> dict[str, str]:
    """For a process of that environment: `trainer_hooks` and tests/ importable, no network, no GPU, one thread."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(_HERE.parent), str(_HERE))),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",  # the model is tiny: more threads only wait for each other
    }


def run(script: str, job: Mapping[str, Any], scratch: Path) -> Any:
    """What `script` of tests/ answers to `job`; both are JSON, in which NaN and infinities are allowed."""
    question, answer = scratch / "job.json", scratch / "answer.json"
    question.write_text(json.dumps({"model": str(ensure_model()), **job}))
    done = subprocess.run(
        [str(ensure_env()), str(_HERE / script), str(question), str(answer)],
        env=environment(),
        cwd=scratch,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return json.loads(answer.read_text())


def _is_complete(env: Path) -> bool:
    """Told from files alone: pip installs a package after its dependencies."""
    packages = next(env.glob("lib/python3.*/site-packages"), None)
    if packages is None or not (env / "bin" / "python").exists():
        return False
    wanted = (f"torch-{TORCH}*", f"trl-{TRL}", "aiohttp-*", "requests-*")
    return all(any(packages.glob(f"{name}.dist-info")) for name in wanted)


def _build(env: Path) -> None:
    print(f"[trl_env] building {env} (about 100 s)", file=sys.stderr, flush=True)
    shutil.rmtree(env, ignore_errors=True)
    vllm_env._call(vllm_env._base_python(), "-m", "venv", env)
    pip = (env / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    for requirements in (_REQUIREMENTS[:1], _REQUIREMENTS[1:]):
        print(f"[trl_env] installing {', '.join(requirements)}", file=sys.stderr, flush=True)
        vllm_env._call(*pip, "install", "--quiet", *requirements)
    if not _is_complete(env):
        raise RuntimeError(f"{env} lacks some of {', '.join(_REQUIREMENTS)} after its installation")


if __name__ == "__main__":
    print(ensure_env(), ensure_model())
