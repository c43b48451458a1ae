"""Owns the last check before the optimizer: no step is taken on a loss or a gradient that is not finite.

One verdict a step, the same on every rank: a foreach norm of this rank's gradients, one all-reduce of three numbers,
one host synchronisation (a skip is a decision of Python code, so that one is inherent). It may not change a loss, a
gradient or a parameter; what an unscorable token is, is decided in the loss.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

Policy = Literal["skip", "stop"]

# Long enough for a GradScaler to find its scale from 65536, short enough to notice before a night is lost.
DEFAULT_MAX_CONSECUTIVE = 10


class NonFiniteStep(RuntimeError):
    """A step was refused, and the policy or the length of the streak says that training must stop."""


@dataclass(frozen=True, slots=True)
class GuardCounts:
    """What the guard has seen since it was made; the same numbers on every rank."""

    steps: int = 0
    """Verdicts given: steps taken and steps refused."""
    skipped: int = 0
    """Steps refused."""
    consecutive: int = 0
    """Steps refused in a row, up to now; 0 after a good one."""
    nonfinite_losses: int = 0
    """Losses that were not finite, over all micro-batches and ranks."""
    nonfinite_gradients: int = 0
    """Steps whose gradients were not finite (or too large to square) on at least one rank."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How many losses, and how many ranks' gradients, were not finite."""

    nonfinite_losses: int = 0
    nonfinite_ranks: int = 0

    @property
    def good(self) -> bool:
        return self.nonfinite_losses == 0 and self.nonfinite_ranks == 0


class StepGuard:
    """Lets `optimizer.step()` through only when the loss and all gradients are finite, on all ranks alike.

    Making one is enough: it takes the place of `step` on that optimizer object, so that a loop needs no other line.
    `observe(loss)` adds losses to the verdict, one call a micro-batch. Clipping hides an overflow (a norm of inf turns
    every finite gradient into 0), so a loop that clips calls `check()` between backward and clipping.

    With a GradScaler give it as `scaler`, and call `guard.step(loss)` in place of `scaler.step(optimizer)` and
    `scaler.update()`. A loss that is not finite leaves the scaler alone. Gradients that overflow under a finite loss
    are what the scaler is there for: it backs off, and the step counts as skipped.

    `optimizer=None` leaves it unbound until `bind`. Every rank of `group` (the default group when None) must make the
    same calls; a rank without gradients takes part.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        *,
        policy: Policy = "skip",
        max_consecutive: int = DEFAULT_MAX_CONSECUTIVE,
        scaler: torch.amp.GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if policy not in ("skip", "stop"):
            raise ValueError(f"policy must be 'skip' or 'stop', not {policy!r}")
        if max_consecutive < 1:
            raise ValueError(f"max_consecutive must be at least 1, not {max_consecutive}")
        self.policy = policy
        self.max_consecutive = max_consecutive
        self.counts = GuardCounts()
        self._scaler = scaler
        self._group = group
        self._optimizer: torch.optim.Optimizer | None = None
        self._step: Callable[..., Any] | None = None
        self._losses: list[torch.Tensor] = []
        self._verdict = _Verdict()
        self._judged = False
        if optimizer is not None:
            self.bind(optimizer)

    @property
    def may_checkpoint(self) -> bool:
        """False from a refused step until the next good one: what would be saved has not been shown to train."""
        return self.counts.consecutive == 0

    @property
    def overflowed(self) -> bool:
        """Whether the last step was refused for its gradients alone: under a loss scale, a scale that is too high."""
        return not self._verdict.good and self._verdict.nonfinite_losses == 0

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the place of `optimizer.step`; an optimizer bound before gets its own back."""
        self.unbind()
        self._optimizer, self._step = optimizer, optimizer.step

        # Wrapped, so that a scheduler finds the mark it left on the `step` it knows.
        @functools.wraps(optimizer.step)
        def step(_optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
            if closure is not None:
                raise TypeError("StepGuard cannot judge a closure: its gradients would come after the verdict")
            self.step()

        # A method of the optimizer, not a closure: LRScheduler takes `step` apart and binds its function again.
        vars(optimizer)["step"] = MethodType(step, optimizer)

    def unbind(self) -> None:
        """Give the optimizer its own `step` back."""
        if self._optimizer is not None:
            vars(self._optimizer)["step"] = self._step
            self._optimizer = self._step = None

    def observe(self, loss: torch.Tensor) -> None:
        """Add the loss of one micro-batch to the next verdict; never synchronises."""
        self._losses.append(torch.isfinite(loss.detach()).logical_not_().sum())

    def check(self, loss: torch.Tensor | None = None) -> bool:
        """Give the verdict of this step from what was observed and the gradients as they stand now; True is good.

        Asked again before the step it repeats itself. Raises NonFiniteStep, on every rank, where the policy is `stop`
        or this is the `max_consecutive`-th refusal in a row. Collective: every rank must call it.
        """
        if loss is not None:
            self.observe(loss)
        if not self._judged:
            self._verdict = self._reduce_verdict()
            self._count(self._verdict)
            self._judged = True
        return self._verdict.good

    def step(self, loss: torch.Tensor | None = None) -> bool:
        """Check, then step the optimizer (through the scaler where there is one); False when the step was skipped."""
        good = self.check(loss)
        self._judged = False
        optimizer, scaler = self._optimizer, self._scaler
        assert optimizer is not None and self._step is not None
        if scaler is None or not scaler.is_enabled():
            if good:
                self._step()
        elif good:
            with _shadow(optimizer, self._step):
                scaler.step(optimizer)
            scaler.update()
        elif self.overflowed:
            back_off(scaler, optimizer)
        return good

    def _reduce_verdict(self) -> _Verdict:
        if self._optimizer is None:
            raise RuntimeError("StepGuard is bound to no optimizer")
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            device = _local(parameters[0]).device
            losses = sum((bad.to(device) for bad in self._losses), torch.zeros((), device=device, dtype=torch.int64))
            gradients = [_local(p.grad) for p in parameters if p.grad is not None]
            bad = torch.stack([losses, (~_all_finite(gradients, device)).to(torch.int64)])
            if dist.is_available() and dist.is_initialized() and dist.get_world_size(self._group) > 1:
                dist.all_reduce(bad, group=self._group)
            nonfinite_losses, ranks = bad.tolist()
        self._losses.clear()
        return _Verdict(nonfinite_losses, ranks)

    def _count(self, verdict: _Verdict) -> None:
        counts = self.counts
        self.counts = replace(
            counts,
            steps=counts.steps + 1,
            skipped=counts.skipped + (not verdict.good),
            consecutive=0 if verdict.good else counts.consecutive + 1,
            nonfinite_losses=counts.nonfinite_losses + verdict.nonfinite_losses,
            nonfinite_gradients=counts.nonfinite_gradients + (verdict.nonfinite_ranks > 0),
        )
        if verdict.good:
            return
        what = f"{verdict.nonfinite_losses} losses and the gradients of {verdict.nonfinite_ranks} ranks were not finite"
        if self.policy == "stop":
            raise NonFiniteStep(f"step {self.counts.steps} refused: {what}")
        if self.counts.consecutive >= self.max_consecutive:
            raise NonFiniteStep(f"{self.counts.consecutive} steps refused in a row, the last because {what}")


def back_off(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Tell the scaler of the overflow in `optimizer`'s gradients, without a step being taken."""
    with _shadow(optimizer, _no_step):
        scaler.step(optimizer)
    scaler.update()


@contextmanager
def _shadow(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> Iterator[None]:
    """Put `step` on this optimizer object for a while; its class stays as it is."""
    before = optimizer.step
    vars(optimizer)["step"] = step
    try:
        yield
    finally:
        vars(optimizer)["step"] = before


def _no_step(closure: Callable[[], Any] | None = None) -> None:
    """Stands in for `optimizer.step` while the scaler is told of an overflow."""


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a parameter or gradient that is on this rank, as a dense tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor._values() if tensor.is_sparse else tensor


def _all_finite(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Whether the 2-norm of every gradient is finite, 0-d bool: an optimizer that squares them would overflow too.

    float32 at the least, since the norm of finite float16 gradients overflows float16.
    """
    if not gradients:
        return torch.ones((), dtype=torch.bool, device=device)
    wide = any(g.dtype is torch.float64 for g in gradients)
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float64 if wide else torch.float32)
    return torch.isfinite(torch.stack([norm.to(device) for norm in norms])).all()
