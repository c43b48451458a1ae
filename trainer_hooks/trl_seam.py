# mypy: allow-subclassing-any
"""Owns what both TRL hooks stand on: which TRL they know, how they count, a rehearsal before anything is touched.

Imports no TRL, and neither does a hook: what they need of it is on the trainer they are given.
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch

SUPPORTED = "1.16."


class UnsupportedTrainer(RuntimeError):
    """This TRL is not built the way the hooks rely on; the message names its version."""

    def __init__(self, why: str) -> None:
        super().__init__(f"make_nan_safe is written for TRL {SUPPORTED}x, this is TRL {installed_trl()}: {why}")


def installed_trl() -> str:
    try:
        return metadata.version("trl")
    except metadata.PackageNotFoundError:
        return "(not installed)"


@dataclass(slots=True)
class Tally:
    """What goes into the log: tokens since its last entry, losses since the start. All of it over all ranks."""

    trained: int = 0
    unscorable: int = 0
    bounded: int = 0
    nonfinite_losses: int = 0
    unread: torch.Tensor | None = None
    """This rank's losses that were not finite since the last entry, still on the device."""

    def observe(self, loss: torch.Tensor) -> None:
        """Count the loss of a micro-batch as TRL trained on it; never synchronises."""
        nonfinite = (~torch.isfinite(loss.detach())).sum()
        self.unread = nonfinite if self.unread is None else self.unread + nonfinite

    def add(self, accelerator: Any, *tokens: torch.Tensor) -> tuple[int, int]:
        """Count one micro-batch: `tokens` are this rank's trained, unscorable and bounded ones, the first two come back
        summed over the ranks. One collective, one synchronisation.
        """
        local = torch.stack([count.to(torch.int64) for count in tokens])
        trained, unscorable, bounded = accelerator.reduce(local, reduction="sum").tolist()
        self.trained += trained
        self.unscorable += unscorable
        self.bounded += bounded
        return trained, unscorable

    def entry(self, accelerator: Any) -> dict[str, float]:
        """The next entry of the log; collective."""
        if self.unread is not None:
            self.nonfinite_losses += int(accelerator.reduce(self.unread, reduction="sum"))
        trained = max(self.trained, 1)
        entry = {
            "unscorable_fraction": self.unscorable / trained,
            "bounded_fraction": self.bounded / trained,
            "nonfinite_loss": float(self.nonfinite_losses),
        }
        self.trained = self.unscorable = self.bounded = 0
        self.unread = None
        return entry


class StubModel(torch.nn.Module):
    """Stands in for the policy in a rehearsal: its output is its one parameter, the logprobs (B, T)."""

    def __init__(self, logprobs: torch.Tensor) -> None:
        super().__init__()
        self.logprobs = torch.nn.Parameter(logprobs)

    def forward(self, **_inputs: Any) -> SimpleNamespace:
        return SimpleNamespace(log_probs=self.logprobs, entropy=torch.zeros_like(self.logprobs), aux_loss=None)


def understudy(trainer: Any) -> Any:
    """A copy of `trainer` to rehearse with: the same code and settings, metrics and counters of its own."""
    double = copy.copy(trainer)
    double._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    double.current_gradient_accumulation_steps = 1
    double.aux_loss_enabled = False
    return double


def rehearse(act: Callable[[], None]) -> None:
    """Run `act`; whatever it runs into means that this TRL is not the one the hooks know."""
    try:
        act()
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedTrainer(f"the rehearsal failed with {type(error).__name__}: {error}") from error
