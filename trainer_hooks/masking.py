"""Owns what NaN and a mask mean: which logprobs are unscorable, which numbers are broken, how a mask is counted.

No other module of the torch path compares with NaN, an infinity or the floor. Every mask here is written positively
(`low < value <= high`), because each comparison with NaN is False: a NaN slips through any test written the other way.
"""

import torch
from torch import Tensor

FLOOR = -9999.0
"""What vLLM writes for -inf, for a step without logprobs and (Rust front end) for NaN. No real logprob reaches it."""

POSITIVE_TOLERANCE = 1e-3
"""Rounding may leave a logprob a little above 0; anything higher is no probability, such as the sidecar's 9999.0."""

# A half-precision tensor cannot hold -9999: it holds one of these in its place, and bfloat16's lies above the floor.
_FLOOR_AS_STORED = {torch.bfloat16: -9984.0, torch.float16: -10000.0}


def stored_floor(dtype: torch.dtype) -> float:
    """The floor as a tensor of `dtype` stores it: -9984.0 in bfloat16."""
    return _FLOOR_AS_STORED.get(dtype, FLOOR)


def scorable(logprobs: Tensor, floor: float = FLOOR) -> Tensor:
    """True where a behaviour logprob is a usable number: above the floor and not positive. Same shape, bool."""
    return (logprobs > floor).logical_and_(logprobs <= POSITIVE_TOLERANCE)


def mark_unscorable(logprobs: Tensor) -> Tensor:
    """`logprobs` with NaN at each unscorable position, whatever stood there."""
    return torch.where(scorable(logprobs, stored_floor(logprobs.dtype)), logprobs, torch.nan)


def nonfinite(values: Tensor, mask: Tensor) -> Tensor:
    """True where the mask is and the value is NaN or infinite. Same shape, bool."""
    return torch.gt(mask, values.abs() < torch.inf)


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is True, else exactly 0: a product with the mask would keep a NaN."""
    return torch.where(mask, values, 0.0)


def count(mask: Tensor) -> Tensor:
    """How many positions are True, as a 0-d float32 tensor."""
    return mask.sum(dtype=torch.float32)


def mean_of(total: Tensor, counted: Tensor) -> Tensor:
    """`total / counted`, and 0 / 1 where nothing was counted."""
    return total / counted.clamp(min=1.0)
