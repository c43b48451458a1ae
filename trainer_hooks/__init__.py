"""PyTorch hook that turns unscorable marks back into NaN and computes a loss that stays exact and finite."""

from trainer_hooks.config import PolicyLossConfig
from trainer_hooks.guard import StepGuard
from trainer_hooks.loss import PolicyLossOutput, policy_loss
from trainer_hooks.wire import decode_logprobs, pad_logprobs

__all__ = ["PolicyLossConfig", "PolicyLossOutput", "StepGuard", "decode_logprobs", "pad_logprobs", "policy_loss"]
