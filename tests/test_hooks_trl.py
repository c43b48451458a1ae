"""The TRL hooks over trainers written here, so that no TRL is needed: properties, ranks, refusals.

`Async` and `Sync` compute what TRL 1.16 documents of its losses, in a few lines of their own; test_real_trl.py runs the
real ones.
"""

import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from trainer_hooks.trl_async import AsyncHook  # noqa: E402
from trainer_hooks.trl_seam import StubModel, Tally, UnsupportedTrainer, rehearse, understudy  # noqa: E402
from trainer_hooks.trl_sync import SyncHook  # noqa: E402

POLICIES = ("on_policy", "drop")
UNSCORABLE = [math.nan, math.inf, -math.inf, -9999.0, -1e30, 9999.0, 0.002]


class OneRank:
    """Accelerate with one process."""

    num_processes = 1
    device = torch.device("cpu")

    def reduce(self, tensor: Tensor, reduction: str = "mean") -> Tensor:
        return tensor


class TwoRanks(OneRank):
    """The same numbers from another rank, which has seen what this one has."""

    num_processes = 2

    def reduce(self, tensor: Tensor, reduction: str = "mean") -> Tensor:
        assert reduction == "sum"
        return tensor * 2


class Async:
    """What AsyncGRPOTrainer's loss reads and logs."""

    clip = 0.2

    def __init__(self, accelerator: OneRank | None = None) -> None:
        self.accelerator = accelerator or OneRank()
        self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        selected = inputs["token_index"] >= 0
        outputs = model(input_ids=inputs["token_index"])
        new = outputs.log_probs.flatten()[inputs["token_index"][selected]]
        log_ratio = new - inputs["old_log_probs"][selected]
        ratio = log_ratio.exp()
        advantages = inputs["advantages"][selected]
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - self.clip, 1 + self.clip) * advantages)
        self.log(ratio.detach(), log_ratio.detach(), advantages)
        return loss.sum() * self.accelerator.num_processes / inputs["global_n_tokens"][0]

    def log(self, ratio: Tensor, log_ratio: Tensor, advantages: Tensor) -> None:
        low = ((ratio < 1 - self.clip) & (advantages < 0)).float()
        high = ((ratio > 1 + self.clip) & (advantages > 0)).float()
        means = {"ratio": ratio, "kl": ratio - 1 - log_ratio, "clip_ratio/low_mean": low, "clip_ratio/high_mean": high}
        for name, values in (means | {"clip_ratio/region_mean": low + high}).items():
            self._metrics["train"][name].append(values.mean().item())


def batch(old: list[float], advantages: list[float], world: int = 1) -> dict[str, Tensor]:
    """One row of terms at the positions 0, 1, 2, ..., then two slots without a term."""
    terms = len(old)
    return {
        "token_index": torch.tensor([[*range(terms), -1, -1]]),
        "old_log_probs": torch.tensor([[*old, 0.0, 0.0]]),
        "advantages": torch.tensor([[*advantages, 0.0, 0.0]]),
        "global_n_tokens": torch.tensor([float(terms * world)]),
    }


def gradient(
    policy: Any, new: list[float], old: list[float], advantages: list[float], trainer: Async | None = None
) -> tuple[Tensor, Tensor, AsyncHook]:
    model = StubModel(torch.tensor([new]))
    hook = AsyncHook(trainer or Async(), policy, 20.0)
    loss = hook.compute_loss(model, batch(old, advantages))
    loss.backward()
    assert model.logprobs.grad is not None
    return loss.detach(), model.logprobs.grad[0], hook


NEW = [-1.0, -2.0, -0.5, -3.0]
OLD = [-1.1, -1.9, -0.9, -2.0]
ADVANTAGES = [1.0, -1.0, 0.5, -2.0]


def test_scorable_tokens_are_bitwise_the_stock_loss() -> None:
    model = StubModel(torch.tensor([NEW]))
    stock = Async().compute_loss(model, batch(OLD, ADVANTAGES))
    stock.backward()
    loss, grad, hook = gradient("on_policy", NEW, OLD, ADVANTAGES)
    assert torch.equal(loss, stock.detach())
    assert model.logprobs.grad is not None
    assert torch.equal(grad, model.logprobs.grad[0])
    assert hook.tally.entry(OneRank()) == {"unscorable_fraction": 0.0, "bounded_fraction": 0.0, "nonfinite_loss": 0.0}


@pytest.mark.parametrize("value", UNSCORABLE)
def test_on_policy_gives_the_plain_policy_gradient(value: float) -> None:
    loss, grad, _ = gradient("on_policy", NEW, [OLD[0], value, *OLD[2:]], ADVANTAGES)
    _, clean, _ = gradient("on_policy", NEW, OLD, ADVANTAGES)
    assert grad[1].item() == 1.0 / 4  # -advantage * ratio / tokens, with a ratio of exactly 1
    assert torch.equal(grad[[0, 2, 3]], clean[[0, 2, 3]])
    assert math.isfinite(loss.item())


@pytest.mark.parametrize("value", UNSCORABLE)
def test_drop_gives_no_loss_and_no_gradient_and_keeps_the_denominator(value: float) -> None:
    loss, grad, _ = gradient("drop", NEW, [OLD[0], value, *OLD[2:]], ADVANTAGES)
    clean_loss, clean, _ = gradient("drop", NEW, OLD, ADVANTAGES)
    assert grad[1].item() == 0.0
    assert torch.equal(grad[[0, 2, 3]], clean[[0, 2, 3]])
    token = -max(math.exp(-0.1), 1 - Async.clip) * -1.0 / 4
    assert loss.item() == pytest.approx(clean_loss.item() - token, abs=1e-7)


@given(
    values=st.lists(st.sampled_from(UNSCORABLE), min_size=2, max_size=2),
    others=st.lists(st.sampled_from(UNSCORABLE), min_size=2, max_size=2),
    policy=st.sampled_from(POLICIES),
    slots=st.sampled_from([(0, 1), (0, 3), (1, 2), (2, 3)]),
)
@settings(max_examples=60, deadline=None)
def test_it_does_not_matter_which_garbage_stands_there(
    values: list[float], others: list[float], policy: str, slots: tuple[int, int]
) -> None:
    def with_garbage(garbage: list[float]) -> tuple[Tensor, Tensor]:
        old = list(OLD)
        for slot, value in zip(slots, garbage, strict=True):
            old[slot] = value
        loss, grad, _ = gradient(policy, NEW, old, ADVANTAGES)
        return loss, grad

    (loss, grad), (other_loss, other_grad) = with_garbage(values), with_garbage(others)
    assert torch.equal(loss, other_loss)
    assert torch.equal(grad, other_grad)
    assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", [OneRank, TwoRanks])
def test_means_leave_unscorable_tokens_out_on_any_number_of_ranks(policy: str, world: type[OneRank]) -> None:
    trainer = Async(world())
    _, _, hook = gradient(policy, NEW, [OLD[0], math.nan, -9999.0, OLD[3]], ADVANTAGES, trainer)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    ratios = [math.exp(NEW[i] - OLD[i]) for i in (0, 3)]
    assert metrics["ratio"] == pytest.approx(sum(ratios) / 2, rel=1e-6)
    kls = [ratio - 1 - math.log(ratio) for ratio in ratios]
    assert metrics["kl"] == pytest.approx(sum(kls) / 2, rel=1e-5)
    assert metrics["clip_ratio/low_mean"] == pytest.approx(0.5)
    assert metrics["clip_ratio/high_mean"] == 0.0
    assert hook.tally.entry(trainer.accelerator)["unscorable_fraction"] == 0.5


@pytest.mark.parametrize("policy", POLICIES)
def test_a_micro_batch_without_evidence_logs_nan_which_trl_leaves_out(policy: str) -> None:
    trainer = Async()
    loss, grad, _ = gradient(policy, NEW, [math.nan] * 4, ADVANTAGES, trainer)
    assert all(math.isnan(values[-1]) for values in trainer._metrics["train"].values())
    expected = [-advantage / 4 for advantage in ADVANTAGES] if policy == "on_policy" else [0.0] * 4
    assert grad.tolist() == expected
    assert loss.item() == pytest.approx(sum(expected))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("old", "log_ratio"), [(-90.0, 20.0), (-0.5, -20.0)], ids=["above", "below"])
def test_a_log_ratio_out_of_bounds_is_held_and_counted(policy: str, old: float, log_ratio: float) -> None:
    new = -1.0 if log_ratio > 0 else -95.0
    trainer = Async()
    loss, grad, hook = gradient(policy, [new], [old], [-1.0], trainer)
    assert grad.tolist() == [0.0]
    assert trainer._metrics["train"]["ratio"] == [pytest.approx(math.exp(log_ratio), rel=1e-5)]
    assert math.isfinite(loss.item())
    assert hook.tally.entry(OneRank())["bounded_fraction"] == 1.0


@pytest.mark.parametrize("new", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("policy", "old"), [("on_policy", -1.0), ("on_policy", math.nan), ("drop", -1.0)])
def test_a_broken_policy_stays_visible(policy: str, old: float, new: float) -> None:
    loss, _, _ = gradient(policy, [new, -1.0], [old, -1.0], [1.0, 1.0])
    assert math.isnan(loss.item())


def test_positions_that_several_terms_share_get_the_sum_of_their_gradients() -> None:
    model = StubModel(torch.tensor([[-1.0, -2.0]]))
    inputs = batch([-1.0, math.nan, -2.0], [1.0, 4.0, 1.0])
    inputs["token_index"] = torch.tensor([[1, 1, 0, -1, -1]])
    inputs["old_log_probs"] = torch.tensor([[-2.0, math.nan, -1.0, 0.0, 0.0]])
    AsyncHook(Async(), "drop", 20.0).compute_loss(model, inputs).backward()
    assert model.logprobs.grad is not None
    assert model.logprobs.grad.tolist() == [[pytest.approx(-1 / 3), pytest.approx(-1 / 3)]]


def test_the_model_has_no_hook_left_even_after_an_error() -> None:
    model = StubModel(torch.tensor([NEW]))
    trainer = Async()
    trainer.compute_loss = lambda model, inputs: model(x=1) and 1 / 0  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        AsyncHook(trainer, "drop", 20.0).compute_loss(model, batch(OLD, ADVANTAGES))
    assert not model._forward_hooks


def twice(trainer: Async, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    model(x=1)
    return Async.compute_loss(trainer, model, inputs)


def no_kl(trainer: Async, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    loss = Async.compute_loss(trainer, model, inputs)
    trainer._metrics["train"]["kl"].clear()
    return loss


@pytest.mark.parametrize("loss", [twice, no_kl])
def test_a_loss_that_is_built_otherwise_is_refused_as_it_runs(loss: Callable[..., Tensor]) -> None:
    changed = type("Changed", (Async,), {"compute_loss": loss})()
    with pytest.raises(UnsupportedTrainer, match="run the model once and log its means once"):
        AsyncHook(changed, "drop", 20.0).compute_loss(StubModel(torch.tensor([NEW])), batch(OLD, ADVANTAGES))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rehearsal_leaves_the_trainer_as_it_was(policy: Any) -> None:
    trainer = Async()
    rehearse(AsyncHook(understudy(trainer), policy, 20.0).rehearse)
    assert set(vars(trainer)) == {"accelerator", "_metrics"}
    assert trainer._metrics["train"] == {}


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda self, model, inputs: -Async.compute_loss(self, model, inputs), id="other sign"),
        pytest.param(lambda self, model, inputs: inputs["sampler_logprobs"], id="other input"),
        pytest.param(lambda self, model, inputs: model(x=1).logits, id="other output"),
        pytest.param(twice, id="two forwards"),
        pytest.param(no_kl, id="other metrics"),
    ],
)
def test_a_rehearsal_finds_a_loss_that_is_built_otherwise(loss: Callable[..., Tensor]) -> None:
    changed = type("Changed", (Async,), {"compute_loss": loss})()
    with pytest.raises(
        UnsupportedTrainer, match=r"written for TRL 1\.16\.x, this is TRL .*: the rehearsal failed with"
    ):
        rehearse(AsyncHook(understudy(changed), "on_policy", 20.0).rehearse)


class Sync:
    """What GRPOTrainer hands from its generation to its loss, for a fixed generation."""

    def __init__(self, logprobs: Any, ratio: Tensor | None = None, lengths: tuple[int, ...] = (3, 2)) -> None:
        self.accelerator = OneRank()
        self.model = SimpleNamespace(training=True)
        self._logprobs = logprobs
        self._ratio = ratio
        self._lengths = lengths
        self.seen: Any = None

    def _generate(self, prompts: Any) -> tuple[Any, ...]:
        ids = [list(range(length)) for length in self._lengths]
        return [[0]] * len(ids), ids, None, ["x"] * len(ids), self._logprobs, {}, None, []

    def _generate_and_score_completions(self, prompts: Any) -> dict[str, Tensor]:
        self.seen = self._generate(prompts)[4]
        mask = torch.tensor([[1] * n + [0] * (max(self._lengths) - n) for n in self._lengths])
        scored: dict[str, Tensor] = {"completion_mask": mask, "advantages": torch.tensor([1.0, -1.0])}
        if self.seen is not None:
            rows = [torch.tensor([*row, *[0.0] * (max(self._lengths) - len(row))]) for row in self.seen]
            scored["sampling_per_token_logps"] = torch.stack(rows)
        if self._ratio is not None:
            scored["importance_sampling_ratio"] = self._ratio
        return scored

    def compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        return inputs["advantages"].sum()


def installed(trainer: Sync, policy: Any = "on_policy") -> SyncHook:
    hook = SyncHook(trainer, policy, 20.0)
    hook.install()
    return hook


RAW = [[-0.5, None, "NaN"], [9999.0, -9999.0]]


def test_a_generation_is_decoded_where_it_comes_in() -> None:
    trainer = Sync(RAW)
    installed(trainer)
    trainer._generate_and_score_completions([0, 0])
    assert [[math.isnan(value) for value in row] for row in trainer.seen] == [[False, True, True], [True, True]]
    assert trainer.seen[0][0] == -0.5


def test_dropped_tokens_lose_their_advantage_and_only_they() -> None:
    trainer = Sync(RAW)
    installed(trainer, "drop")
    scored = trainer._generate_and_score_completions([0, 0])
    assert scored["advantages"].tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, -1.0]]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_clean_generation_keeps_its_advantages(policy: str) -> None:
    trainer = Sync([[-0.5, -0.5, -0.5], [-0.5, -0.5]])
    installed(trainer, policy)
    assert trainer._generate_and_score_completions([0, 0])["advantages"].tolist() == [1.0, -1.0]


def test_unscorable_tokens_are_counted_among_the_trained_ones() -> None:
    trainer = Sync(RAW)
    hook = installed(trainer)
    trainer.compute_loss(None, trainer._generate_and_score_completions([0, 0]))
    assert hook.tally.entry(OneRank())["unscorable_fraction"] == 4 / 5


def test_tokens_of_a_tool_are_not_counted_whatever_their_logprobs() -> None:
    trainer = Sync(RAW)
    score = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda prompts: {  # type: ignore[method-assign]
        **score(prompts),
        "tool_mask": torch.tensor([[1, 0, 1], [0, 1, 1]]),
    }
    hook = installed(trainer, "drop")
    scored = trainer._generate_and_score_completions([0, 0])
    assert scored["advantages"].tolist() == [[1.0, 1.0, 0.0], [-1.0, 0.0, -1.0]]
    trainer.compute_loss(None, scored)
    assert hook.tally.entry(OneRank())["unscorable_fraction"] == 2 / 3


def test_a_ratio_is_bounded_and_counted() -> None:
    trainer = Sync([[-0.5] * 3, [-0.5] * 2], ratio=torch.tensor([[1.0, math.inf, 2.0], [0.0, 1.0, math.inf]]))
    hook = installed(trainer)
    scored = trainer._generate_and_score_completions([0, 0])
    assert scored["importance_sampling_ratio"].max().item() == pytest.approx(math.exp(20.0), rel=1e-6)
    trainer.compute_loss(None, scored)
    assert hook.tally.entry(OneRank())["bounded_fraction"] == 1 / 5  # the other one is padding


def test_a_generation_without_logprobs_passes() -> None:
    trainer = Sync(None)
    hook = installed(trainer, "drop")
    trainer.compute_loss(None, trainer._generate_and_score_completions([0, 0]))
    assert hook.tally.entry(OneRank())["unscorable_fraction"] == 0.0


def test_logprobs_that_are_not_one_per_token_are_refused() -> None:
    trainer = Sync([[-0.5, -0.5], [-0.5, -0.5]])
    installed(trainer)
    with pytest.raises(ValueError, match="2 logprobs for 3 sampled tokens"):
        trainer._generate_and_score_completions([0, 0])


def test_a_correction_that_does_not_know_nan_is_refused() -> None:
    trainer = Sync(RAW, ratio=torch.full((2, 3), 0.5))
    installed(trainer)
    with pytest.raises(UnsupportedTrainer, match="sampling ratio of a NaN logprob is not 1"):
        trainer._generate_and_score_completions([0, 0])


def test_a_generation_of_another_form_is_refused() -> None:
    trainer = Sync(RAW)
    hook = installed(trainer)
    hook._generate = lambda prompts: (1, 2, 3)
    with pytest.raises(UnsupportedTrainer, match="_generate returns 3 values, not 8"):
        trainer._generate_and_score_completions([0, 0])


def test_the_tally_counts_losses_for_good_and_tokens_for_one_entry() -> None:
    tally = Tally()
    tally.observe(torch.tensor(math.nan))
    tally.observe(torch.tensor(0.5))
    assert tally.add(TwoRanks(), torch.tensor(8), torch.tensor(2), torch.tensor(1)) == (16, 4)
    expected = {"unscorable_fraction": 0.25, "bounded_fraction": 0.125, "nonfinite_loss": 2.0}
    assert tally.entry(TwoRanks()) == expected
    assert tally.entry(TwoRanks()) == {"unscorable_fraction": 0.0, "bounded_fraction": 0.0, "nonfinite_loss": 2.0}


def test_trainer_hooks_import_no_trl() -> None:
    code = "import sys, trainer_hooks; print([m for m in ('trl', 'transformers', 'accelerate') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
