"""What a step should have been: loss, KL, ratio and gradient, token by token in float64. Runs in TRL's environment.

Shares no code with TRL or with the hook: plain forwards of one sequence at a time, a loop over tokens, autograd.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CLIP = 0.2
BOUND = 20.0


@dataclass(frozen=True)
class Sample:
    """One row of training: `old` holds what the trainer was given, marks and all."""

    ids: list[int]
    mask: list[int]
    old: list[float]
    advantage: float


@dataclass(frozen=True)
class Truth:
    """`ratio` and `kl` are means over the tokens whose behaviour logprob is usable; NaN where there is none."""

    loss: float
    ratio: float
    kl: float
    trained: int
    unscorable: int
    gradient: dict[str, Tensor]


def is_unscorable(value: float) -> bool:
    return not (-9999.0 < value <= 1e-3)


def truth(model: Any, parameters: Mapping[str, Tensor], samples: Sequence[Sample], policy: str) -> Truth:
    """The step on `samples` at `parameters`, which are put into `model`, float64.

    `policy` is what an unscorable token is worth: "on_policy" a ratio of 1 through which the gradient flows, "drop"
    nothing; the denominator counts it either way.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    model.zero_grad(set_to_none=True)
    trained = sum(sum(sample.mask) for sample in samples)
    loss, ratios, kls, unscorable = torch.zeros((), dtype=torch.float64), [], [], 0
    for sample in samples:
        logits = model(torch.tensor([sample.ids])).logits[0]
        for position, in_loss in enumerate(sample.mask):
            if not in_loss:
                continue
            new = logits[position - 1].log_softmax(-1)[sample.ids[position]]
            if is_unscorable(sample.old[position]):
                unscorable += 1
                if policy == "on_policy":
                    loss = loss - torch.exp(new - new.detach()) * sample.advantage / trained
                continue
            log_ratio = (new - sample.old[position]).clamp(-BOUND, BOUND)
            ratio = log_ratio.exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = loss - torch.minimum(ratio * sample.advantage, clipped * sample.advantage) / trained
            ratios.append(ratio.item())
            kls.append(ratio.item() - 1 - log_ratio.item())
    if loss.requires_grad:
        loss.backward()
    gradient = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    mean = [math.nan if not values else sum(values) / len(values) for values in (ratios, kls)]
    return Truth(loss.item(), *mean, trained, unscorable, gradient)


def distance(gradient: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of any entry, over the largest entry that was expected."""
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    worst = [float((gradient[name].double() - tensor).abs().max()) for name, tensor in expected.items()]
    return math.nan if any(map(math.isnan, worst)) else max(worst) / (scale or 1.0)
