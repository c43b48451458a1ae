"""TRL 1.16's real trainers on the CPU, each bad logprob in one trained token, with the hook and without it.

The rollouts are given, so no engine is needed. The cases of a group run in one process of TRL's own environment.
"""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import trl_env

pytestmark = [pytest.mark.real_trl, pytest.mark.timeout(900)]  # a busy machine takes a group of cases that long

TENSORS = 27
"""Parameters of the tiny model."""
TOLERANCE = 3e-6
"""Largest gradient error, relative to the largest entry: float32 against float64."""

VALUES = {
    "none": None,
    "string": "NaN",
    "nan": math.nan,
    "-inf": -math.inf,
    "floor": -9999.0,
    "sentinel": -1e30,
    "ceiling": 9999.0,
    "inf": math.inf,
    "string inf": "Infinity",
    "-100": -100.0,
    "-90": -90.0,
    "0": 0.0,
}
UNSCORABLE = [name for name in VALUES if name not in ("-100", "-90", "0")]
SIGNS = {"positive": 0, "negative": 1}


def pair(**bad: dict[str, Any]) -> list[dict[str, Any]]:
    """Two rollouts of one prompt, with the advantages 1 and -1; `positive` and `negative` say what is bad in each."""
    prompt = [70, 71, 72]
    return [
        {
            "ids": [*prompt, *range(first, first + trained)],
            "mask": [0] * len(prompt) + [1] * trained,
            "advantage": advantage,
            "bad": bad.get(sign, {}),
        }
        for sign, first, trained, advantage in (("positive", 100, 4, 1.0), ("negative", 110, 5, -1.0))
    ]


def turns(**bad: Any) -> list[dict[str, Any]]:
    """The same with a second turn, whose context (a tool's answer) is in no loss; `bad` is for the negative one."""
    rollouts = pair()
    for rollout, old in zip(rollouts, ({}, bad), strict=True):
        rollout["ids"] += [80, 81, 120, 121, 122]
        rollout["mask"] += [0, 0, 1, 1, 1]
        rollout["bad"] = {position.removeprefix("at_"): value for position, value in old.items()}
    return rollouts


def everywhere(value: Any) -> list[dict[str, Any]]:
    rollouts = pair()
    for rollout in rollouts:
        rollout["bad"] = {str(position): value for position, trained in enumerate(rollout["mask"]) if trained}
    return rollouts


def injected(**options: Any) -> dict[str, dict[str, Any]]:
    return {
        f"{value} {sign}": {"rollouts": pair(**{sign: {"4": VALUES[value]}}), **options}
        for value in VALUES
        for sign in SIGNS
    }


def each_policy(name: str, rollouts: list[dict[str, Any]], **options: Any) -> dict[str, dict[str, Any]]:
    return {
        f"{name} {policy}": {"rollouts": copy.deepcopy(rollouts), "hook": policy, **options}
        for policy in ("on_policy", "drop")
    }


BROKEN = {"rollouts": pair(), "hook": "on_policy", "steps": 3}

ASYNC = {
    "stock": injected(max_grad_norm=1.0),  # TRL's default
    "on_policy": injected(hook="on_policy", twin="on_policy"),
    "drop": injected(hook="drop", twin="drop"),
    "shapes": {
        "clean": {"rollouts": pair(), "hook": "on_policy", "twin": "on_policy"},
        **each_policy("bf16", pair(positive={"4": None}), bf16=True),
        **each_policy("turns", turns(at_4=math.nan, at_8=math.nan, at_9=None, at_11=-9999.0)),
        **each_policy("accumulation", pair() + pair(negative={"4": None, "6": 9999.0}), accumulation=2),
        **each_policy("one micro-batch", everywhere(-9999.0) + pair(), accumulation=2),
        **each_policy("all", everywhere(None)),
    },
    "guard": {
        "filter on": {**BROKEN, "broken_steps": [1], "nan_filter": True},
        "filter off": {**BROKEN, "broken_steps": [1], "nan_filter": False},
        "clipping": {**BROKEN, "broken_steps": [1], "max_grad_norm": 1.0},
        "one of two micro-batches": {**BROKEN, "rollouts": pair() + pair(), "accumulation": 2, "broken_steps": [1]},
        "no guard": {**BROKEN, "broken_steps": [1], "guard": None},
        "stop": {**BROKEN, "broken_steps": [1], "guard": "stop"},
        "streak": {**BROKEN, "broken_steps": [0, 1, 2], "max_consecutive": 2},
        "checkpoints": {**BROKEN, "broken_steps": [1], "save_steps": 1},
        "owed checkpoint": {**BROKEN, "broken_steps": [1], "steps": 4, "save_steps": 2},
    },
}
for _name in ("bf16 on_policy", "turns on_policy", "accumulation on_policy", "all on_policy"):
    ASYNC["shapes"][_name]["twin"] = "on_policy"
ASYNC["shapes"]["bf16 drop"]["twin"] = ASYNC["shapes"]["turns drop"]["twin"] = "drop"

SYNC_MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")
SYNC = {
    "stock": {f"stock {name}": {"rollouts": pair(negative={"4": VALUES[name]})} for name in UNSCORABLE},
    "hook": {
        **{
            key: case
            for name in UNSCORABLE
            for key, case in each_policy(name, pair(negative={"4": VALUES[name]})).items()
        },
        **{
            key: case
            for mode in SYNC_MODES
            for key, case in each_policy(mode, pair(positive={"4": None}, negative={"6": -9999.0}), mode=mode).items()
        },
        **each_policy("turns", turns(at_4=math.nan, at_9=None, at_11=-9999.0), mode="token_truncate"),
        **each_policy("accumulation", pair() + pair(negative={"4": None, "6": 9999.0}), accumulation=2),
        **each_policy("all", everywhere(-9999.0)),
        "broken": {**BROKEN, "broken_steps": [1]},
    },
}


class Runs:
    """Runs a group of cases when the first of its results is asked for."""

    def __init__(self, script: str, groups: dict[str, dict[str, Any]], scratch: Path) -> None:
        self._script = script
        self._groups = groups
        self._scratch = scratch
        self._results: dict[str, dict[str, Any]] = {}

    def __call__(self, group: str, name: str) -> dict[str, Any]:
        if group not in self._results:
            cases = self._groups[group]
            answers = trl_env.run(self._script, {"cases": list(cases.values())}, self._scratch)
            self._results[group] = dict(zip(cases, answers, strict=True))
        return self._results[group][name]


@pytest.fixture(scope="module")
def run_async(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs("trl_async_cases.py", ASYNC, tmp_path_factory.mktemp("async"))


@pytest.fixture(scope="module")
def run_sync(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs("trl_sync_cases.py", SYNC, tmp_path_factory.mktemp("sync"))


def logged(result: dict[str, Any], name: str) -> list[Any]:
    return [entry[name] for entry in result["log"]]


def assert_exact(result: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    """Finite throughout, and the first step's gradient, loss, kl and ratio those of the naive computation."""
    assert result["error"] is None
    assert set(result["nonfinite_tensors"]) == {0}
    assert result["gradient_error"] < tolerance
    first = result["log"][0]
    for name, value in result["naive"].items():
        assert first[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert set(logged(result, "nonfinite_loss")) == set(logged(result, "skipped_steps")) == {0.0}


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("value", ["none", "string", "nan"])
def test_stock_nan_ends_every_parameter_and_logs_a_loss_of_zero(run_async: Runs, value: str, sign: str) -> None:
    result = run_async("stock", f"{value} {sign}")
    assert result["nonfinite_tensors"] == [TENSORS, TENSORS]
    assert logged(result, "loss") == [0.0, 0.0]
    assert logged(result, "kl") == logged(result, "ratio") == [None, None]


@pytest.mark.parametrize("value", ["-inf", "floor", "sentinel", "-100"])
def test_stock_floor_ends_every_parameter_within_two_steps(run_async: Runs, value: str) -> None:
    assert run_async("stock", f"{value} negative")["nonfinite_tensors"] == [TENSORS, TENSORS]
    assert run_async("stock", f"{value} positive")["nonfinite_tensors"][1] == TENSORS


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("value", ["ceiling", "inf", "string inf", "0"])
def test_stock_survives_what_makes_the_ratio_small(run_async: Runs, value: str, sign: str) -> None:
    assert run_async("stock", f"{value} {sign}")["nonfinite_tensors"] == [0, 0]


def test_stock_loses_the_step_to_a_finite_logprob_far_off(run_async: Runs) -> None:
    result = run_async("stock", "-90 negative")
    assert result["nonfinite_tensors"] == [0, 0]
    assert result["moved"] == [False, False]
    assert logged(result, "grad_norm") == [math.inf, math.inf]


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("policy", ["on_policy", "drop"])
def test_the_hook_is_exact_and_finite_whatever_the_value(run_async: Runs, policy: str, value: str, sign: str) -> None:
    result = run_async(policy, f"{value} {sign}")
    assert_exact(result)
    assert result["moved"] == [True, True]
    assert logged(result, "unscorable_fraction") == [1 / 9 if value in UNSCORABLE else 0.0] * 2
    assert logged(result, "bounded_fraction") == [1 / 9 if value in ("-100", "-90") else 0.0] * 2
    if value in UNSCORABLE:
        assert logged(result, "kl")[0] == pytest.approx(math.exp(0.05) - 1.05, rel=1e-4)
        assert logged(result, "ratio")[0] == pytest.approx(math.exp(0.05), rel=1e-6)


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("value", [name for name in UNSCORABLE])
@pytest.mark.parametrize("policy", ["on_policy", "drop"])
def test_the_gradient_is_bitwise_that_of_trl_done_by_hand(run_async: Runs, policy: str, value: str, sign: str) -> None:
    assert run_async(policy, f"{value} {sign}")["twin_equal"] is True


def test_a_clean_batch_trains_bitwise_as_without_the_hook(run_async: Runs) -> None:
    result = run_async("shapes", "clean")
    assert_exact(result)
    assert result["twin_equal"] is True
    assert logged(result, "unscorable_fraction") == [0.0, 0.0]


@pytest.mark.parametrize("policy", ["on_policy", "drop"])
def test_bfloat16_is_bitwise_trl_done_by_hand(run_async: Runs, policy: str) -> None:
    result = run_async("shapes", f"bf16 {policy}")
    assert result["twin_equal"] is True
    assert result["nonfinite_tensors"] == [0, 0]


@pytest.mark.parametrize("policy", ["on_policy", "drop"])
def test_rows_of_several_turns_count_only_what_is_trained(run_async: Runs, policy: str) -> None:
    result = run_async("shapes", f"turns {policy}")
    assert_exact(result)
    assert result["twin_equal"] is True
    # 15 trained tokens; of the four bad ones the two at 8 and 9 are context.
    assert logged(result, "unscorable_fraction") == [2 / 15, 2 / 15]


@pytest.mark.parametrize("policy", ["on_policy", "drop"])
def test_gradient_accumulation_keeps_its_denominators(run_async: Runs, policy: str) -> None:
    result = run_async("shapes", f"accumulation {policy}")
    assert_exact(result)
    assert logged(result, "unscorable_fraction") == [2 / 18, 2 / 18]


@pytest.mark.parametrize("policy", ["on_policy", "drop"])
def test_a_micro_batch_without_a_scorable_token_leaves_the_metrics_to_the_others(run_async: Runs, policy: str) -> None:
    result = run_async("shapes", f"one micro-batch {policy}")
    assert_exact(result)
    assert logged(result, "unscorable_fraction") == [0.5, 0.5]


def test_a_batch_without_a_scorable_token_is_plain_policy_gradient_on_policy(run_async: Runs) -> None:
    result = run_async("shapes", "all on_policy")
    assert_exact(result)
    assert result["twin_equal"] is True
    assert logged(result, "kl") == logged(result, "ratio") == [None, None]
    assert logged(result, "unscorable_fraction") == [1.0, 1.0]


def test_a_batch_without_a_scorable_token_has_no_gradient_where_they_are_dropped(run_async: Runs) -> None:
    result = run_async("shapes", "all drop")
    assert_exact(result)
    assert result["gradient_norm"] == 0.0
    assert result["moved"] == [False, False]
    assert logged(result, "loss") == [0.0, 0.0]
    assert logged(result, "kl") == logged(result, "ratio") == [None, None]


@pytest.mark.parametrize("case", ["filter on", "filter off", "clipping", "one of two micro-batches"])
def test_a_broken_step_is_skipped_and_counted_where_no_filter_reaches(run_async: Runs, case: str) -> None:
    result = run_async("guard", case)
    micro_batches = 2.0 if case == "one of two micro-batches" else 1.0
    assert result["error"] is None
    assert result["nonfinite_tensors"] == [0, 0, 0]
    assert result["moved"] == [True, False, True]
    assert result["learning_steps"] == 2
    assert logged(result, "nonfinite_loss") == [0.0, micro_batches, micro_batches]
    assert logged(result, "skipped_steps") == [0.0, 1.0, 1.0]
    # The learning rate waits with the step it belongs to.
    assert logged(result, "learning_rate") == pytest.approx([1e-4, 2e-4 / 3, 2e-4 / 3])


def test_without_a_guard_the_loss_is_counted_and_the_parameters_are_lost(run_async: Runs) -> None:
    result = run_async("guard", "no guard")
    assert result["nonfinite_tensors"] == [0, TENSORS, TENSORS]
    assert logged(result, "nonfinite_loss") == [0.0, 1.0, 2.0]
    assert logged(result, "skipped_steps") == [0.0, 0.0, 0.0]


def test_stop_ends_training_before_the_step(run_async: Runs) -> None:
    result = run_async("guard", "stop")
    assert result["error"] == ("NonFiniteStep: step 2 refused: 1 losses and the gradients of 1 ranks were not finite")
    assert result["nonfinite_tensors"] == [0]


def test_a_streak_ends_training(run_async: Runs) -> None:
    result = run_async("guard", "streak")
    assert result["error"].startswith("NonFiniteStep: 2 steps refused in a row")
    assert result["nonfinite_tensors"] == [0]
    assert result["learning_steps"] == 0


def test_no_checkpoint_is_written_after_a_refused_step(run_async: Runs) -> None:
    assert run_async("guard", "checkpoints")["checkpoints"] == ["checkpoint-1", "checkpoint-3"]


def test_a_checkpoint_that_was_held_back_is_made_up_for(run_async: Runs) -> None:
    assert run_async("guard", "owed checkpoint")["checkpoints"] == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize("value", ["-inf", "floor", "sentinel", "ceiling", "inf"])
def test_the_stock_synchronous_trainer_silently_loses_the_whole_sequence(run_sync: Runs, value: str) -> None:
    result = run_sync("stock", f"stock {value}")
    assert result["nonfinite_tensors"] == [0, 0]
    assert result["gradient_error"] > 0.5
    assert result["log"][0]["sampling/importance_sampling_ratio/min"] == 0.0


@pytest.mark.parametrize("value", ["none", "nan"])
def test_the_stock_synchronous_trainer_knows_nan_and_none(run_sync: Runs, value: str) -> None:
    assert run_sync("stock", f"stock {value}")["gradient_error"] < TOLERANCE


@pytest.mark.parametrize("value", ["string", "string inf"])
def test_the_stock_synchronous_trainer_stops_at_a_string(run_sync: Runs, value: str) -> None:
    assert run_sync("stock", f"stock {value}")["error"].startswith("TypeError")


@pytest.mark.parametrize("policy", ["on_policy", "drop"])
@pytest.mark.parametrize("value", UNSCORABLE)
def test_the_synchronous_trainer_is_exact_whatever_the_value(run_sync: Runs, value: str, policy: str) -> None:
    result = run_sync("hook", f"{value} {policy}")
    assert_exact(result)
    assert logged(result, "unscorable_fraction") == [1 / 9, 1 / 9]
    assert result["log"][0]["sampling/sampling_logp_difference/max"] == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("policy", ["on_policy", "drop"])
@pytest.mark.parametrize("mode", SYNC_MODES)
def test_every_sampling_correction_leaves_unscorable_tokens_out(run_sync: Runs, mode: str, policy: str) -> None:
    result = run_sync("hook", f"{mode} {policy}")
    assert_exact(result)
    assert logged(result, "unscorable_fraction") == [2 / 9, 2 / 9]


@pytest.mark.parametrize("policy", ["on_policy", "drop"])
@pytest.mark.parametrize(("case", "fraction"), [("turns", 2 / 15), ("accumulation", 2 / 18), ("all", 1.0)])
def test_the_synchronous_trainer_in_other_shapes(run_sync: Runs, case: str, fraction: float, policy: str) -> None:
    result = run_sync("hook", f"{case} {policy}")
    assert_exact(result)
    assert logged(result, "unscorable_fraction") == pytest.approx([fraction, fraction])
    assert (result["gradient_norm"] == 0.0) == ((case, policy) == ("all", "drop"))


def test_the_synchronous_trainer_skips_a_broken_step(run_sync: Runs) -> None:
    result = run_sync("hook", "broken")
    assert result["nonfinite_tensors"] == [0, 0, 0]
    assert result["moved"] == [True, False, True]
    assert logged(result, "nonfinite_loss") == [0.0, 1.0, 1.0]
    assert logged(result, "skipped_steps") == [0.0, 1.0, 1.0]


def test_a_trl_that_is_not_the_expected_one_is_refused_untouched(tmp_path: Path) -> None:
    refusals = trl_env.run("trl_refusal_cases.py", {}, tmp_path)
    known = "UnsupportedTrainer: make_nan_safe is written for TRL 1.16.x, this is TRL 1.16.0: "
    assert refusals["other sign"].startswith(known + "the rehearsal failed with AssertionError")
    assert refusals["other input"].startswith(known + "the rehearsal failed with KeyError")
    assert refusals["other metrics"].startswith(known + "the rehearsal failed with UnsupportedTrainer")
    assert refusals["other sync loss"].startswith(known + "the rehearsal failed with AssertionError")
    assert refusals["another version"] == (
        "UnsupportedTrainer: make_nan_safe is written for TRL 1.16.x, this is TRL 1.17.0: another version"
    )
    assert refusals["twice"] == "ValueError: this trainer is nan-safe already"
    assert refusals["no trainer"].startswith("TypeError: make_nan_safe is for TRL's")
    assert refusals["no policy"].startswith("ValueError: unscorable must be one of on_policy, drop")
