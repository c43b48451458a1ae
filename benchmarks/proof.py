"""The proof: a real TRL trains from a real vLLM that emits real NaN, with and without the sidecar and the hook.

    python benchmarks/proof.py [--steps N] [--arms 1,2,4] [--rounds N] [--short]

Needs two CPU cores, 16 GiB and `pip install -e '.[bench,test]'` for the Python that runs it; builds vLLM's and TRL's
own environments when they are absent (tests/vllm_env.py, tests/trl_env.py). Prints the table and the claims, writes
proof.json, proof.md and proof.png beside itself, exits 1 where a claim does not hold.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import proof_report
import proof_run
from proof_arms import ARMS, Engine, Run

SHORT = "1,2,4,5,6,8,9a,9b"
TIMED = ("1", "2", "4")


def run_arms(names: Sequence[str], engines: proof_run.Engines, steps: int, rounds: int) -> Iterator[Run]:
    """The timed arms in turn, so that a busy machine slows all of them, and then every other one once."""
    arms = [ARMS[name] for name in names]
    engines.boot([Engine.POISONED, *(arm.engine for arm in arms)])
    fixed_batch = proof_run.take_fixed_batch(engines)
    timed = [arm for arm in arms if arm.name in TIMED]
    for arm in [*timed * rounds, *(arm for arm in arms if arm not in timed)]:
        started = time.monotonic()
        run = proof_run.run_arm(arm, engines, steps, fixed_batch if arm.takes_fixed_batch else ())
        _say(f"arm {arm.name}: {run.trainer.ended}, {time.monotonic() - started:.0f} s")
        yield run


def write(runs: Sequence[Run], claims: Sequence[proof_report.Claim], folder: Path) -> None:
    record = {"runs": [asdict(run) for run in runs], "claims": [asdict(claim) for claim in claims]}
    (folder / "proof.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    lines = [f"- {'holds' if claim.holds else '**FAILS**'}: {claim.text}: {claim.numbers}" for claim in claims]
    (folder / "proof.md").write_text(proof_report.table(runs) + "\n" + "\n".join(lines) + "\n")
    try:
        proof_report.draw(runs, folder / "proof.png")
    except ModuleNotFoundError as error:
        _say(f"no plot: {error} (pip install logprob-sidecar[bench])")


def _say(text: str) -> None:
    print(f"[proof] {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="run the arms of the proof, print one table, save one plot")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each arm")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"any of {','.join(ARMS)}")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each of the timed arms, in turn")
    parser.add_argument("--short", action="store_true", help=f"3 steps, 1 round, arms {SHORT}")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="folder of what is written")
    options = parser.parse_args()
    if options.short:
        options.steps, options.rounds, options.arms = 3, 1, SHORT
    names = options.arms.split(",")
    if unknown := [name for name in names if name not in ARMS]:
        parser.error(f"no such arm: {', '.join(unknown)}")
    out = options.out.resolve()
    os.chdir(proof_run.HERE.parent)  # in this folder `python -m proxy` would start the benchmark of that name
    out.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    with proof_run.Engines() as engines:
        for run in run_arms(names, engines, options.steps, options.rounds):
            runs.append(run)
            claims = proof_report.claims(runs)
            write(runs, claims, out)
    print((out / "proof.md").read_text())
    sys.exit(not all(claim.holds for claim in claims))


if __name__ == "__main__":
    main()
