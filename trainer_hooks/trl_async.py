"""Owns the loss of one AsyncGRPOTrainer: what its `compute_loss` reads, so that nothing unscorable reaches an exp."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer_hooks.config import Unscorable
from trainer_hooks.masking import scorable, stored_floor
from trainer_hooks.trl_seam import StubModel, Tally, UnsupportedTrainer


class AsyncHook:
    """AsyncGRPOTrainer subtracts `old_log_probs` itself, from positions that several samples may share.

    So the log-ratio of each loss term is computed here, from the model's output, and handed on as the model's
    log-probability with an old one of 0: what TRL exponentiates and clips is then finite by construction.
    """

    # Means over all loss terms, to which an unscorable one adds a ratio of 1 and nothing else.
    MEANS = ("ratio", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")

    def __init__(self, trainer: Any, unscorable: Unscorable, bound: float) -> None:
        self.tally = Tally()
        self._trainer = trainer
        self._drop = unscorable == "drop"
        self._bound = bound
        self._compute_loss = trainer.compute_loss

    def install(self) -> None:
        self._trainer.compute_loss = self.compute_loss

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        selected = inputs["token_index"] >= 0
        old = inputs["old_log_probs"]
        bad = selected & ~scorable(old, stored_floor(old.dtype))
        neutral = dict(inputs)
        neutral["old_log_probs"] = torch.zeros_like(old)
        # The n-th loss term reads the n-th log-ratio; slots without a term stay negative.
        neutral["token_index"] = torch.where(selected, selected.flatten().cumsum(0).view_as(selected) - 1, -1)
        if self._drop:
            neutral["advantages"] = torch.where(bad, 0.0, inputs["advantages"])
        metrics = self._trainer._metrics["train"]
        entries = {name: len(metrics[name]) for name in self.MEANS}
        with self._log_ratios(model, inputs["token_index"][selected], old[selected], bad[selected]) as bounded:
            loss: torch.Tensor = self._compute_loss(model, neutral, *args, **kwargs)
        if len(bounded) != 1 or any(len(metrics[name]) != n + 1 for name, n in entries.items()):
            raise UnsupportedTrainer("compute_loss does not run the model once and log its means once")
        trained, unscorable = self.tally.add(self._trainer.accelerator, selected.sum(), bad.sum(), bounded[0])
        for name in self.MEANS if unscorable else ():
            total = metrics[name][-1] * trained - (unscorable if name == "ratio" else 0)
            # NaN is how TRL's log leaves out a micro-batch that has no evidence.
            metrics[name][-1] = total / (trained - unscorable) if trained > unscorable else float("nan")
        return loss

    @contextmanager
    def _log_ratios(
        self, model: Any, index: torch.Tensor, old: torch.Tensor, bad: torch.Tensor
    ) -> Iterator[list[torch.Tensor]]:
        """Have `model` return the log-ratio and the entropy of each loss term, (M,); yields how many were bounded."""
        bounded: list[torch.Tensor] = []

        def replace(_module: Any, _inputs: Any, outputs: Any) -> Any:
            new = outputs.log_probs.flatten()[index]
            # On the policy itself: exactly 0, while the gradient is that of `new`. A small bias where it is stale.
            log_ratio = new - torch.where(bad, new.detach(), old)
            # An infinite new logprob is a broken policy: the bound below must not make a number of it.
            log_ratio = torch.where(new.isfinite(), log_ratio, torch.nan)
            if self._drop:
                log_ratio = torch.where(bad, 0.0, log_ratio)
            bounded.append((log_ratio.detach().abs() > self._bound).sum())
            outputs.log_probs = log_ratio.clamp(-self._bound, self._bound)
            outputs.entropy = outputs.entropy.flatten()[index]
            return outputs

        handle = model.register_forward_hook(replace)
        try:
            yield bounded
        finally:
            handle.remove()

    def rehearse(self) -> None:
        """Three loss terms, the last two unscorable: the gradients must be the ones worked out by hand."""
        device, world = self._trainer.accelerator.device, float(self._trainer.accelerator.num_processes)
        model = StubModel(torch.tensor([[-1.05, -2.0, -3.0, -4.0]], device=device))
        rows = {
            "input_ids": [0, 0, 0, 0],
            "attention_mask": [1, 1, 1, 1],
            "position_ids": [0, 1, 2, 3],
            "shift_labels": [0, 0, 0, -100],
            "token_index": [0, 1, 2, -1],
            "old_log_probs": [-1.0, float("nan"), -9999.0, 0.0],
            "advantages": [1.0, -1.0, 2.0, 0.0],
            "segment_id": [0, 0, 0, 0],
            "tree_kv_index": [0, 1, 2, 3],
            "tree_cu_seqlens_q": [0, 4],
            "tree_cu_seqlens_k": [0, 4],
            "tree_max_seqlens": [4, 4],
        }
        inputs = {name: torch.tensor([row], device=device) for name, row in rows.items()}
        inputs |= {"global_n_tokens": torch.tensor([3.0 * world], device=device)}
        inputs |= {name: torch.tensor([4.0], device=device) for name in ("global_n_forward_tokens", "mean_seq_len")}
        (gradient,) = torch.autograd.grad(self.compute_loss(model, inputs), model.logprobs)
        ratio = torch.tensor(-0.05).exp().item()
        expected = [-ratio / 3, 0.0, 0.0, 0.0] if self._drop else [-ratio / 3, 1 / 3, -2 / 3, 0.0]
        torch.testing.assert_close(gradient, torch.tensor([expected], device=device))
        logged = self._trainer._metrics["train"]
        torch.testing.assert_close([logged["ratio"], logged["kl"]], [[ratio], [ratio - 1 + 0.05]], rtol=0, atol=1e-5)
