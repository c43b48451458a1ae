"""Owns what can be chosen about the loss, and the numbers that follow from the choice alone. Knows no tensor maths."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

Loss = Literal["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo"]
Unscorable = Literal["on_policy", "drop"]

# exp of it must stay far from float32's largest number, 3.4e38, also after a product with an advantage.
_LARGEST_BOUND = 80.0


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """What `policy_loss` computes. Raises ValueError, naming the field, for a value that makes no sense."""

    loss: Loss = "dapo"
    """How token losses become one number, and for gspo and cispo also what a token's loss is."""

    clip_low: float = 0.2
    """A ratio under 1 - clip_low earns a negative advantage nothing more. Not used by cispo, as in its experiments."""

    clip_high: float = 0.2
    """A ratio over 1 + clip_high earns a positive advantage nothing more; in cispo the largest weight is
    1 + clip_high (TRL's `epsilon_high` is that weight itself)."""

    clip_ratio_c: float | None = None
    """Dual clip: the largest ratio where the advantage is negative. TRL calls it `delta`. Not used by cispo."""

    log_ratio_bound: float = 20.0
    """A token's log-ratio is held within plus and minus this before exp; beyond it the token has no gradient."""

    unscorable: Unscorable = "on_policy"
    """A trained token whose old logprob is unscorable: ratio exactly 1, or no loss and no gradient."""

    denominator: float | Tensor | None = None
    """The sum of the token losses is divided by this, whatever the loss; None: the loss's own rule."""

    max_length: int | None = None
    """dr_grpo divides by sequences times this, the longest completion that generation allows."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("loss", self.loss, get_args(Loss)),
            ("unscorable", self.unscorable, get_args(Unscorable)),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        if not self.clip_low >= 0.0:
            raise ValueError(f"clip_low must not be negative, not {self.clip_low!r}")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high must not be negative, not {self.clip_high!r}")
        if self.clip_ratio_c is not None and not self.clip_ratio_c > 1.0:
            raise ValueError(f"clip_ratio_c must be greater than 1, not {self.clip_ratio_c!r}")
        if not 0.0 < self.log_ratio_bound <= _LARGEST_BOUND:
            raise ValueError(f"log_ratio_bound must lie in (0, {_LARGEST_BOUND:g}], not {self.log_ratio_bound!r}")
        self._check_denominator()

    def _check_denominator(self) -> None:
        match self.denominator:
            case None:
                if self.loss == "dr_grpo" and (self.max_length is None or self.max_length < 1):
                    raise ValueError(f"loss dr_grpo needs a max_length of at least 1, not {self.max_length!r}")
            case Tensor() as tensor:
                if tensor.numel() != 1:
                    raise ValueError(f"denominator must hold one number, not a tensor of {tuple(tensor.shape)}")
            case number:
                if not 0.0 < number < math.inf:
                    raise ValueError(f"denominator must be a positive number, not {number!r}")

    @property
    def per_sequence_mean(self) -> bool:
        """The loss's own rule is the mean over sequences of the mean over their tokens."""
        return self.denominator is None and self.loss in ("grpo", "gspo")

    @property
    def needs_sequences(self) -> bool:
        """The loss cannot be computed without knowing where each sequence ends."""
        return self.loss == "gspo" or (self.denominator is None and self.loss in ("grpo", "dr_grpo"))


@dataclass(frozen=True, slots=True)
class LogBounds:
    """Where the log-ratio stops to count, by the sign of the advantage; each lies within the log-ratio bound."""

    low: float
    """Lower end, advantage negative."""
    high: float
    """Upper end, advantage positive (in cispo for any sign)."""
    dual: float
    """Upper end, advantage negative."""
    bound: float
    """Either end, where nothing clips."""


def log_bounds(config: PolicyLossConfig) -> LogBounds:
    """The clip range in log space: clip_low 0.2 gives log 0.8."""
    bound = config.log_ratio_bound
    low = -bound
    if config.clip_low < 1.0 and config.loss != "cispo":
        low = max(low, math.log1p(-config.clip_low))
    high = min(bound, math.log1p(config.clip_high))
    if config.loss == "cispo":
        return LogBounds(low, high, high, bound)
    dual = bound if config.clip_ratio_c is None else min(bound, math.log(config.clip_ratio_c))
    return LogBounds(low, high, dual, bound)
