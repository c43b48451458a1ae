"""The proof in short, as CI runs it: TRL's real trainer fed by real vLLM servers that emit real NaN.

The arms, and the whole of it with a table and a plot, are in benchmarks/proof.py.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import VllmFleet

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # last: its proxy.py must not hide the package

import proof_run
from proof_arms import ARMS, Engine, Run
from proof_report import CORRUPT, EXACT, GRADIENT_TOLERANCE, RATIOS, SURVIVE, VALUE_TOLERANCE

pytestmark = [
    pytest.mark.real_vllm,
    pytest.mark.real_trl,
    pytest.mark.timeout(1500),  # the first test boots three servers and runs three arms
]

STEPS = 3
# The engine comes upon a poisoned id by sampling, at about 1.5 % of its tokens, and TRL's seeds are random: two steps
# of four completions hold none once in 300 runs.
MAX_TOKENS = 48
SHORT = ("1", "2", "4", "5", "6", "8", "9a", "9b")
TIMED = ("1", "2", "4")
ROUNDS = 4


class Proof:
    """Runs an arm when it is first asked for; the timed ones in turn."""

    def __init__(self, engines: proof_run.Engines) -> None:
        self._engines = engines
        self._fixed_batch = proof_run.take_fixed_batch(engines)
        self._runs: dict[str, list[Run]] = defaultdict(list)

    def runs(self, name: str) -> list[Run]:
        if not self._runs[name]:
            self.add_round(TIMED if name in TIMED else (name,))
        return self._runs[name]

    def add_round(self, names: tuple[str, ...]) -> None:
        for name in names:
            fixed_batch = self._fixed_batch if ARMS[name].takes_fixed_batch else ()
            self._runs[name].append(proof_run.run_arm(ARMS[name], self._engines, STEPS, fixed_batch, MAX_TOKENS))


@pytest.fixture(scope="module")
def proof(vllm_fleet: VllmFleet) -> Iterator[Proof]:
    pair = vllm_fleet.pair(poisoned=True)
    with proof_run.Engines() as engines:
        engines.lend(Engine.POISONED, pair.python.url)
        engines.lend(Engine.RUST, pair.rust.url)
        yield Proof(engines)


def chosen(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in SHORT]


@pytest.mark.parametrize("arm", chosen(SURVIVE))
def test_all_steps_are_done_finite_and_no_rollout_is_lost(proof: Proof, arm: str) -> None:
    for run in proof.runs(arm):
        assert (run.trainer.ended, len(run.steps)) == ("finished", STEPS)
        assert [step.nonfinite for step in run.steps] == [0] * STEPS
        assert (run.traffic.failures, run.traffic.lost) == ({}, 0)
        assert run.traffic.delivered == run.traffic.attempts
        assert run.counted['requests_total{code="200",route="/v1/completions"}'] == run.traffic.attempts


@pytest.mark.parametrize("arm", chosen(EXACT))
def test_every_gradient_is_the_references(proof: Proof, arm: str) -> None:
    for run in proof.runs(arm):
        assert run.unscorable > 0
        assert [step.gradient_error for step in run.steps] == pytest.approx([0.0] * STEPS, abs=GRADIENT_TOLERANCE)
        assert run.trainer.fixed_gradient_error == pytest.approx(0.0, abs=GRADIENT_TOLERANCE)


@pytest.mark.parametrize("arm", ["5", "6", "9b"])
def test_with_the_hook_the_log_is_true(proof: Proof, arm: str) -> None:
    for run in proof.runs(arm):
        for step in run.steps:
            # TRL's log leaves out, as None, what no token gives evidence of.
            true = {name: None if math.isnan(value) else value for name, value in step.true.items()}
            assert {name: step.logged[name] for name in true} == pytest.approx(true, rel=1e-3, abs=1e-5)
            assert step.logged["unscorable_fraction"] == step.unscorable / step.trained
            assert step.logged["skipped_steps"] == 0


@pytest.mark.parametrize("arm", chosen(CORRUPT))
def test_without_sidecar_and_hook_the_rust_front_end_corrupts_silently(proof: Proof, arm: str) -> None:
    for run in proof.runs(arm):
        assert (run.trainer.ended, len(run.steps)) == ("finished", STEPS)
        assert run.traffic.failures == {}
        assert run.steps[-1].nonfinite == run.trainer.parameters
        assert run.steps[-1].logged["loss"] == 0.0
        assert run.steps[-1].logged["kl"] is None


@pytest.mark.parametrize(("slower", "faster", "limit"), RATIOS, ids=[f"{a}-over-{b}" for a, b, _ in RATIOS])
def test_wall_time(proof: Proof, slower: str, faster: str, limit: float) -> None:
    def best(name: str) -> float:
        # Whatever else a machine does can only add to a time.
        return min(run.wall_s for run in proof.runs(name))

    while best(slower) / best(faster) > limit and len(proof.runs(slower)) < ROUNDS:
        proof.add_round(TIMED)
    assert best(slower) / best(faster) <= limit


def test_trls_synchronous_client_reads_literal_nan(proof: Proof) -> None:
    (run,) = proof.runs("s2")
    assert (run.trainer.ended, len(run.steps), run.finite) == ("finished", STEPS, True)
    parsed = run.trainer.parsed
    assert parsed is not None
    assert parsed.none == run.counted['unscorable_tokens_total{reason="nan",route="/v1/completions"}'] > 0
    assert parsed.mismatched == 0
    assert parsed.value_error <= VALUE_TOLERANCE
