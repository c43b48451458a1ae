"""Owns the arithmetic of the loss in plain torch: loss, gradient and metrics together. The reference for the Triton
path, the path of every CPU tensor, and what torch.compile traces.

The gradient is written out, not left to autograd: autograd multiplies the zero that reaches a masked slot with whatever
lies there, and needs twice the passes over memory. Nothing here reads a value back from the device.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_hooks.config import LogBounds, PolicyLossConfig, log_bounds
from trainer_hooks.masking import count, keep, mean_of, nonfinite, scorable
from trainer_hooks.sequences import Sequences

METRICS = ("ratio_mean", "kl", "clip_low_fraction", "clip_high_fraction", "unscorable_fraction", "nonfinite_fraction")


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens are (rows, width) in one floating dtype; a packed batch is one row."""

    new: Tensor
    old: Tensor
    advantages: Tensor
    """(rows, width), or one for each sequence: (sequences, 1)."""
    mask: Tensor
    """(rows, width), bool."""
    sequences: Sequences | None
    """None: a packed batch whose boundaries are not known."""
    floor: float
    """The unscorable floor as the dtype stores it in which `old` came."""

    def token_advantages(self) -> Tensor:
        """Something that broadcasts over (rows, width)."""
        if self.sequences is None or self.advantages.shape == self.new.shape:
            return self.advantages
        return self.sequences.spread(self.advantages)


class Evaluation(NamedTuple):
    """`gradient * scale` is the derivative of `loss` with respect to the new logprobs."""

    loss: Tensor
    gradient: Tensor
    scale: Tensor
    metrics: Tensor
    """(6,), in the order of METRICS."""


class _Terms(NamedTuple):
    """What the tokens add up to; `value` and `gradient` are exactly 0 where a token has no part in the loss."""

    value: Tensor
    gradient: Tensor
    low: Tensor
    high: Tensor
    """True where the lower, the upper end of the allowed range acts."""
    ratio_excess: Tensor
    """Sum of ratio - 1 over the scored tokens: elsewhere the log-ratio is 0, so that no mask is needed."""
    kl: Tensor


def evaluate(batch: Batch, config: PolicyLossConfig) -> Evaluation:
    """Loss, gradient and metrics of one batch, in the dtype of its tokens."""
    scored = scorable(batch.old, batch.floor).logical_and_(batch.mask)
    kept = batch.mask if config.unscorable == "on_policy" else scored
    broken = nonfinite(batch.new, batch.mask)
    # on_policy is this 0: the old policy is taken to be the new one. Where the rollout is stale that is a small bias,
    # and a deliberate one: the alternative is to learn nothing from a sound sample whose number got lost.
    log_ratio = keep(batch.new - batch.old, scored)
    # The bound would hide an infinite new logprob, and the 0 a NaN one.
    log_ratio.masked_fill_(broken & kept, torch.nan)
    terms = (_sequence_level if config.loss == "gspo" else _token_level)(batch, config, log_ratio, scored, kept)
    loss, scale = _reduce(terms.value, batch, config)
    return Evaluation(loss, terms.gradient, scale, _metrics(batch.mask, scored, broken, terms))


def _token_level(batch: Batch, config: PolicyLossConfig, log_ratio: Tensor, scored: Tensor, kept: Tensor) -> _Terms:
    """PPO's clipped ratio (1707.06347) of each token, or CISPO's clipped and detached weight (2506.13585)."""
    bounds = log_bounds(config)
    bounded = log_ratio.clamp(-bounds.bound, bounds.bound)
    ratio = bounded.exp()
    surrogate, low, high = _clip(log_ratio, ratio, batch.token_advantages(), bounds)
    value = keep(surrogate, kept)
    if config.loss == "cispo":
        gradient, value = value, keep(value * batch.new, kept)
    else:
        gradient = keep(value, ~(low | high))
    excess = ratio.sub_(1.0)
    return _Terms(value, gradient, low, high, excess.sum(), excess.sub_(bounded).sum())


def _sequence_level(batch: Batch, config: PolicyLossConfig, log_ratio: Tensor, scored: Tensor, kept: Tensor) -> _Terms:
    """GSPO (2507.18071): the scored tokens of a sequence share one ratio, the exponential of their mean log-ratio.

    An unscorable token is no evidence about that ratio: it is left out of the mean, and its own ratio is 1. Where one
    sequence has several advantages its ratio meets each of them, as in TRL with `importance_sampling_level="sequence"`.
    """
    assert batch.sequences is not None
    bounds, sequences = log_bounds(config), batch.sequences
    bounded = log_ratio.clamp(-bounds.bound, bounds.bound)
    members = sequences.sum(scored).clamp_(min=1.0)
    mean = sequences.sum(keep(bounded, scored)) / members
    shared = torch.where(scored, sequences.spread(mean), log_ratio)
    ratio = shared.exp()
    surrogate, low, high = _clip(shared, ratio, batch.token_advantages(), bounds)
    value = keep(surrogate, kept)
    gradient = keep(value, ~(low | high))
    # The mean hands each of its tokens the same share; one that lies beyond the bound could move and change nothing.
    share = sequences.sum(keep(gradient, scored)) / members
    gradient = torch.where(scored, sequences.spread(share), gradient)
    below, above = log_ratio < -bounds.bound, log_ratio > bounds.bound
    gradient = keep(gradient, ~(below | above))
    kl = bounded.exp().sub_(1.0).sub_(bounded).sum()
    return _Terms(value, gradient, low | below, high | above, ratio.sub_(1.0).sum(), kl)


def _clip(log_ratio: Tensor, ratio: Tensor, advantages: Tensor, bounds: LogBounds) -> tuple[Tensor, Tensor, Tensor]:
    """-advantage * ratio, the ratio held in the range that the advantage's sign allows; where its two ends act.

    The pessimistic minimum of PPO lets a ratio move freely against the advantage; dual clip (1912.09729) ends that for
    a negative one. The ends enclose 0, so that a token whose log-ratio is 0 is never clipped.
    """
    negative, positive = advantages < 0.0, advantages > 0.0
    low_end = torch.full_like(advantages, -bounds.bound).masked_fill_(negative, bounds.low)
    high_end = torch.full_like(advantages, bounds.bound).masked_fill_(positive, bounds.high)
    high_end.masked_fill_(negative, bounds.dual)
    low, high = log_ratio < low_end, log_ratio > high_end
    # A clamp with tensor bounds passes NaN on.
    return torch.clamp(ratio, low_end.exp_(), high_end.exp_()).mul_(-advantages), low, high


def _reduce(value: Tensor, batch: Batch, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    """The sum of the token losses in the loss's own measure, and the factor the gradient still lacks.

    The mask counts, not what was scored: under drop a token leaves the numerator and stays in the denominator, or the
    other tokens of its batch would gain weight.
    """
    sequences = batch.sequences
    if config.per_sequence_mean:
        assert sequences is not None
        weight = sequences.sum(batch.mask).clamp_(min=1.0).mul_(max(sequences.number, 1)).reciprocal_().to(value.dtype)
        return (sequences.sum(value) * weight).sum(), sequences.spread(weight)
    total = value.sum()
    match config.denominator:
        case None if config.loss == "dr_grpo":
            assert sequences is not None and config.max_length is not None
            scale = torch.full_like(total, 1.0 / max(sequences.number * config.max_length, 1))
        case None:
            scale = count(batch.mask).clamp_(min=1.0).reciprocal_().to(total.dtype)
        case Tensor() as tensor:
            # An empty batch may come with a denominator of 0, which must not turn its 0 into NaN.
            tiny = torch.finfo(total.dtype).tiny
            scale = torch.ones_like(total) / tensor.detach().reshape(()).to(total.dtype).clamp(min=tiny)
        case number:
            scale = torch.full_like(total, 1.0 / number)
    return total * scale, scale


def _metrics(mask: Tensor, scored: Tensor, broken: Tensor, terms: _Terms) -> Tensor:
    """Ratio and kl over the scored tokens (an unscorable one is no evidence either way), the fractions over the mask.

    kl is the estimator ratio - 1 - log ratio. Without evidence the ratio's mean is 1 and the kl 0.
    """
    trained, evidence = count(mask), count(scored)
    return torch.stack(
        (
            mean_of(terms.ratio_excess, evidence).add_(1.0),
            mean_of(terms.kl, evidence),
            mean_of(count(terms.low), trained),
            mean_of(count(terms.high), trained),
            mean_of(trained - evidence, trained),
            mean_of(count(broken), trained),
        )
    ).float()
