"""Owns the sampler's logprobs of one GRPOTrainer: from the generation on, an unscorable one is NaN, which TRL knows."""

from typing import Any

import torch

from trainer_hooks.config import Unscorable
from trainer_hooks.trl_seam import StubModel, Tally, UnsupportedTrainer, understudy
from trainer_hooks.wire import decode_logprobs


class SyncHook:
    """GRPOTrainer corrects for the sampler's logprobs by a ratio of its own, where NaN already means a ratio of 1.

    So the logprobs of a generation are decoded as they come in, and a dropped token gets an advantage of 0. Terms that
    do not read them (clipping against the trainer's own old logprobs, KL to the reference, entropy) stay TRL's.
    """

    def __init__(self, trainer: Any, unscorable: Unscorable, bound: float) -> None:
        self.tally = Tally()
        self._trainer = trainer
        self._drop = unscorable == "drop"
        self._max_ratio = torch.tensor(bound).exp().item()
        self._compute_loss = trainer.compute_loss
        self._generate = trainer._generate
        self._score = trainer._generate_and_score_completions

    def install(self) -> None:
        self._trainer.compute_loss = self.compute_loss
        self._trainer._generate = self.generate
        self._trainer._generate_and_score_completions = self.score

    def generate(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        generated: tuple[Any, ...] = self._generate(*args, **kwargs)
        if len(generated) != 8:
            raise UnsupportedTrainer(f"_generate returns {len(generated)} values, not 8")
        if generated[4] is None:
            return generated
        rows = zip(generated[4], generated[1], strict=True)
        decoded = [decode_logprobs(logprobs, length=len(ids)).tolist() for logprobs, ids in rows]
        return (*generated[:4], decoded, *generated[5:])

    def score(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = self._score(*args, **kwargs)
        unscorable = _unscorable_in(batch)
        if "importance_sampling_ratio" in batch:
            ratio = batch["importance_sampling_ratio"].clamp(max=self._max_ratio)
            if ratio.shape == unscorable.shape and bool((ratio[unscorable] != 1).any()):
                raise UnsupportedTrainer("the sampling ratio of a NaN logprob is not 1")
            batch["importance_sampling_ratio"] = ratio
        if self._drop and bool(unscorable.any()):
            advantages = batch["advantages"]
            advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
            batch["advantages"] = torch.where(unscorable, 0.0, advantages)
        return batch

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = self._compute_loss(model, inputs, *args, **kwargs)
        if self._trainer.model.training:
            mask = _mask(inputs)
            ratio = inputs.get("importance_sampling_ratio", torch.zeros((), device=loss.device))
            bounded = (mask & (ratio >= self._max_ratio)).sum()
            self.tally.add(self._trainer.accelerator, mask.sum(), _unscorable_in(inputs).sum(), bounded)
        return loss

    def rehearse(self) -> None:
        """A dropped token, as `score` marks it, must lose its gradient and leave the others theirs."""
        kept = self._gradient(torch.tensor([1.0]))
        dropped = self._gradient(torch.tensor([[1.0, 0.0, 1.0]]))
        if not bool(kept.all()):
            raise UnsupportedTrainer(f"a trained token without a gradient: {kept.tolist()}")
        torch.testing.assert_close(dropped, kept * torch.tensor([1.0, 0.0, 1.0], device=kept.device))

    def _gradient(self, advantages: torch.Tensor) -> torch.Tensor:
        """The gradient of each of three completion tokens, (3,), policy term alone."""
        double = understudy(self._trainer)
        double.beta = 0.0
        double.off_policy_mask_threshold = None
        double.top_entropy_quantile = 1.0
        double.importance_sampling_level = "token"
        double._entropy_bonus_enabled = False
        device = double.accelerator.device
        model = StubModel(torch.tensor([[0.0, 0.0, -1.0, -1.5, -2.0]], device=device))
        double.model = model  # in training, as the trainer's own is not yet
        inputs = {name: torch.ones(1, 2, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")}
        inputs |= {name: torch.ones(1, 3, dtype=torch.long) for name in ("completion_ids", "completion_mask")}
        inputs["advantages"] = advantages
        inputs["old_per_token_logps"] = torch.tensor([[-1.0, -1.5, -2.0]])
        inputs["sampling_per_token_logps"] = torch.tensor([[-1.0, float("nan"), -2.0]])
        inputs["importance_sampling_ratio"] = torch.ones(1, 3)
        inputs["num_items_in_batch"] = torch.tensor(3.0)
        loss = SyncHook(double, "drop", 20.0).compute_loss(model, {k: v.to(device) for k, v in inputs.items()})
        (gradient,) = torch.autograd.grad(loss, model.logprobs)
        return gradient[0, -3:]


def _mask(batch: dict[str, Any]) -> torch.Tensor:
    """The trained tokens of a batch, (B, T) bool."""
    mask: torch.Tensor = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def _unscorable_in(batch: dict[str, Any]) -> torch.Tensor:
    """The trained tokens whose logprob the sampler could not give, (B, T) bool; none where none were asked for."""
    mask = _mask(batch)
    logprobs = batch.get("sampling_per_token_logps")
    return torch.zeros_like(mask) if logprobs is None else mask & logprobs.isnan()
