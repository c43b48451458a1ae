# mypy: allow-subclassing-any
"""Owns the way into TRL 1.16: makes one AsyncGRPOTrainer or GRPOTrainer survive unscorable logprobs.

Works on the given object alone: no module is patched, no line of TRL is copied. What TRL does not promise (what its
`compute_loss` reads, which metrics it logs) is rehearsed on a copy of the trainer before anything is touched.
"""

from typing import Any, Literal, TypeVar

import torch
import trl
from transformers import TrainerCallback

from trainer_hooks.config import PolicyLossConfig, Unscorable
from trainer_hooks.guard import StepGuard, back_off
from trainer_hooks.trl_async import AsyncHook
from trainer_hooks.trl_seam import SUPPORTED, Tally, UnsupportedTrainer, installed_trl, rehearse, understudy
from trainer_hooks.trl_sync import SyncHook

__all__ = ["UnsupportedTrainer", "make_nan_safe"]

Trainer = TypeVar("Trainer", bound=Any)

LOG_RATIO_BOUND = 20.0

_MARK = "_nan_safe"


def make_nan_safe(
    trainer: Trainer,
    *,
    unscorable: Unscorable = "on_policy",
    guard: StepGuard | Literal["skip", "stop"] | None = "skip",
    log_ratio_bound: float = LOG_RATIO_BOUND,
) -> Trainer:
    """Make `trainer` (changed in place, and returned) train exactly and finitely whatever the rollouts' logprobs hold.

    `unscorable`: what a trained token without a usable behaviour logprob is worth. `on_policy`: its ratio is exactly 1
    and the gradient flows; `drop`: no policy loss and no gradient, the denominator still counts it. `guard`: a policy,
    or a StepGuard (bound to no optimizer yet, or to this trainer's) whose counts are then yours to read; None for none.

    Every training entry of `log_history` gets `unscorable_fraction` and `bounded_fraction` (of the trained tokens since
    the last entry), and `nonfinite_loss` and `skipped_steps` (counted from the start, over all ranks).

    Raises UnsupportedTrainer where TRL is not what this was written for, and changes nothing then.
    """
    PolicyLossConfig(unscorable=unscorable, log_ratio_bound=log_ratio_bound)  # raises for a value without meaning
    if not installed_trl().startswith(SUPPORTED):
        raise UnsupportedTrainer("another version")
    if _MARK in vars(trainer):
        raise ValueError("this trainer is nan-safe already")
    hook_class = _hook_for(trainer)
    if isinstance(guard, str):
        guard = StepGuard(None, policy=guard)
    if guard is not None and trainer.is_deepspeed_enabled:
        raise UnsupportedTrainer("DeepSpeed steps where no guard can look; pass guard=None")
    rehearse(lambda: hook_class(understudy(trainer), unscorable, log_ratio_bound).rehearse())
    hook = hook_class(trainer, unscorable, log_ratio_bound)
    hook.install()
    vars(trainer)[_MARK] = hook
    _watch_losses(trainer, hook.tally, guard)
    _add_to_log(trainer, hook.tally, guard)
    return trainer


def _hook_for(trainer: Any) -> type[AsyncHook] | type[SyncHook]:
    if isinstance(trainer, trl.GRPOTrainer):
        return SyncHook
    from trl.experimental.async_grpo import AsyncGRPOTrainer  # only now: it needs packages the other one does not

    if isinstance(trainer, AsyncGRPOTrainer):
        return AsyncHook
    raise TypeError(f"make_nan_safe is for TRL's AsyncGRPOTrainer and GRPOTrainer, not {type(trainer).__name__}")


def _watch_losses(trainer: Any, tally: Tally, guard: StepGuard | None) -> None:
    """Look at each loss as training takes it, and judge each step as its last backward ends: clipping comes after, and
    would hide an overflow.
    """
    training_step = trainer.training_step

    def watched_training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = training_step(*args, **kwargs)
        tally.observe(loss)
        if guard is not None:
            guard.observe(loss)
            if trainer.accelerator.sync_gradients:
                guard.check()
        return loss

    trainer.training_step = watched_training_step
    if guard is not None:
        trainer.add_callback(_GuardCallback(trainer, guard))


def _add_to_log(trainer: Any, tally: Tally, guard: StepGuard | None) -> None:
    """Add the counts to each training entry; evaluations and the last summary hold no `loss` of their own."""
    log = trainer.log

    def log_counts(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs |= tally.entry(trainer.accelerator)
            logs["skipped_steps"] = float(guard.counts.skipped if guard else 0)
        log(logs, *args, **kwargs)

    trainer.log = log_counts


class _GuardCallback(TrainerCallback):
    """Binds the guard to the optimizer TRL prepares, reports a skip to accelerate, keeps checkpoints back meanwhile."""

    def __init__(self, trainer: Any, guard: StepGuard) -> None:
        self._trainer = trainer
        self._guard = guard
        self._owed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guard.bind(self._trainer.optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer, refused = self._trainer.optimizer, not self._guard.may_checkpoint
        if optimizer.scaler is None:
            optimizer._is_overflow = refused  # the learning rate waits as it does for a scaler's own overflow
        elif refused:
            if self._guard.overflowed:
                back_off(optimizer.scaler, optimizer.optimizer)
            optimizer._is_overflow = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hold a checkpoint back until a good step, then make up for it."""
        wanted = control.should_save or self._owed
        control.should_save = wanted and self._guard.may_checkpoint
        self._owed = wanted and not control.should_save

    on_epoch_end = on_step_end
