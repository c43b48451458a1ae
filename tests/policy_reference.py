"""The policy loss once more, written as naively as it can be: token by token, in float64, with autograd's gradient.

It shares nothing with the package but the meaning, so that a test that compares the two says something.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer_hooks import PolicyLossConfig

Tokens = list[tuple[int, int]]


@dataclass
class Tally:
    """Sums for the metrics."""

    ratios: list[float] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)
    low: int = 0
    high: int = 0
    unscorable: int = 0
    broken: int = 0
    trained: int = 0

    def metrics(self) -> dict[str, float]:
        trained = max(self.trained, 1)
        return {
            "ratio_mean": sum(self.ratios) / len(self.ratios) if self.ratios else 1.0,
            "kl": sum(self.kls) / len(self.kls) if self.kls else 0.0,
            "clip_low_fraction": self.low / trained,
            "clip_high_fraction": self.high / trained,
            "unscorable_fraction": self.unscorable / trained,
            "nonfinite_fraction": self.broken / trained,
        }


@dataclass(frozen=True)
class Reference:
    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def is_unscorable(old: float, dtype: torch.dtype) -> bool:
    floor = float(torch.tensor(-9999.0, dtype=dtype))
    return not math.isfinite(old) or old <= floor or old > 1e-3


def reference(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, config: PolicyLossConfig) -> Reference:
    """(B, T) with advantages (B,), (B, 1) or (B, T)."""
    leaf = new.detach().double().requires_grad_()
    spread = advantages.double().reshape(len(new), -1).expand(new.shape)
    tally = Tally()
    sequences = []
    for b in range(len(new)):
        chosen = [t for t in range(new.shape[1]) if mask[b, t]]
        losses = _sequence(leaf[b], old[b], spread[b], chosen, config, tally)
        sequences.append((losses, len(chosen)))
    loss = _reduce(sequences, config, tally.trained) + 0.0 * torch.where(mask, leaf, 0.0).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return Reference(loss.item(), gradient, tally.metrics())


def _sequence(
    new: Tensor, old: Tensor, advantages: Tensor, chosen: list[int], config: PolicyLossConfig, tally: Tally
) -> list[Tensor]:
    bound = config.log_ratio_bound
    scored = [t for t in chosen if not is_unscorable(old[t].item(), old.dtype)]
    log_ratios = {t: (new[t] - old[t].item()).clamp(-bound, bound) for t in scored}
    shared = torch.stack(list(log_ratios.values())).mean() if scored else None
    losses: list[Tensor] = []
    for t in chosen:
        tally.trained += 1
        tally.broken += not math.isfinite(new[t].item())
        tally.unscorable += t not in log_ratios
        if t not in log_ratios and config.unscorable == "drop":
            continue
        log_ratio: Any = new[t] - new[t].detach() if t not in log_ratios else log_ratios[t]
        if t in log_ratios:
            tally.kls.append((log_ratio.exp() - 1 - log_ratio).item())
            if config.loss == "gspo":
                log_ratio = shared
            tally.ratios.append(log_ratio.exp().item())
            _tally_clips(log_ratio.item(), new[t].item() - old[t].item(), advantages[t].item(), config, tally)
        losses.append(-_objective(log_ratio.exp(), new[t], advantages[t], config))
    return losses


def _objective(ratio: Tensor, new: Tensor, advantage: Tensor, config: PolicyLossConfig) -> Tensor:
    if config.loss == "cispo":
        return ratio.detach().clamp(max=1 + config.clip_high) * advantage * new
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    if config.clip_ratio_c is not None and advantage < 0:
        objective = torch.maximum(objective, config.clip_ratio_c * advantage)
    return objective


def _tally_clips(log_ratio: float, raw: float, advantage: float, config: PolicyLossConfig, tally: Tally) -> None:
    ratio, bound = math.exp(log_ratio), config.log_ratio_bound
    low, high = raw < -bound, raw > bound
    if config.loss == "cispo":
        high = high or ratio > 1 + config.clip_high
    else:
        low = low or (advantage < 0 and ratio < 1 - config.clip_low)
        high = high or (advantage > 0 and ratio > 1 + config.clip_high)
        high = high or (advantage < 0 and config.clip_ratio_c is not None and ratio > config.clip_ratio_c)
    tally.low += low
    tally.high += high


def _reduce(sequences: list[tuple[list[Tensor], int]], config: PolicyLossConfig, trained: int) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    total = sum((loss for losses, _ in sequences for loss in losses), zero)
    if config.denominator is not None:
        return total / float(config.denominator)
    match config.loss:
        case "grpo" | "gspo":
            return sum((sum(losses, zero) / max(n, 1) for losses, n in sequences), zero) / len(sequences)
        case "dr_grpo":
            assert config.max_length is not None
            return total / (len(sequences) * config.max_length)
        case _:
            return total / max(trained, 1)
