"""Owns the door: checks shapes, casts to float32, picks the path (Triton on CUDA, else plain torch), hooks the gradient
into autograd. It may not know what a token's loss is, and it never reads a value back from the device.
"""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer_hooks.config import PolicyLossConfig
from trainer_hooks.masking import stored_floor
from trainer_hooks.objective import METRICS, Batch, Evaluation, evaluate
from trainer_hooks.sequences import PackedSequences, PaddedSequences, Sequences, sequence_ids

_DEFAULT = PolicyLossConfig()


class PolicyLossOutput(NamedTuple):
    """`loss` is a 0-d float32 tensor with a graph to the new logprobs; `metrics` are detached 0-d float32 tensors."""

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: PolicyLossConfig = _DEFAULT,
    *,
    cu_seqlens: Tensor | None = None,
) -> PolicyLossOutput:
    """The clipped policy-gradient loss of a batch, exact and finite whatever the unscorable and masked slots hold.

    Shapes: `logprobs`, `old_logprobs`, `mask` (B, T) with `advantages` (B,), (B, 1) or (B, T); or packed, all (T,).
    `cu_seqlens` (S + 1,), for packed batches only, are the boundaries as in variable-length attention: [0, 2, 5] is a
    sequence of two tokens and one of three; with it `advantages` may be (S,). grpo, dr_grpo and gspo need it, unless an
    explicit denominator takes the place of the rule (gspo always does). `mask` is True, or not 0, at trained tokens.

    A trained token's ratio is exp(new - old), PPO's clipping applies (arXiv 1707.06347). The loss's own rule:

    - grpo (2402.03300): mean over sequences of the mean over their tokens;
    - dapo (2503.14476), bnpo: mean over all trained tokens of this batch. They differ in TRL, where dapo's count spans
      the accumulated global batch: give that count as `denominator`;
    - dr_grpo (2503.20783): sum over sequences * max_length;
    - gspo (2507.18071): the ratio is the sequence's, the reduction grpo's;
    - cispo (2506.13585): weight min(ratio, 1 + clip_high), detached, times advantage times logprob; mean over tokens.

    Signs, reductions and clip metrics are those of TRL 1.16. float32 inside, whatever the dtypes.

    Where the old logprob is unscorable the token is on policy (ratio exactly 1, the plain policy gradient) or dropped
    (no loss, no gradient, still counted by the denominator). A NaN or infinite *new* logprob that takes part in the
    loss is a broken policy: the loss is NaN, and `nonfinite_fraction` says how much of the mask is.

    Metrics: `ratio_mean` and `kl` over the scorable trained tokens; `clip_low_fraction`, `clip_high_fraction` (a clip
    or the log-ratio bound acted), `unscorable_fraction`, `nonfinite_fraction` over the trained tokens.

    Raises ValueError for shapes that do not fit, naming them.
    """
    batch = _batch(logprobs.detach(), old_logprobs.detach(), advantages.detach(), mask, cu_seqlens)
    if config.needs_sequences and batch.sequences is None:
        raise ValueError(f"loss {config.loss} on a packed batch needs cu_seqlens: it is defined over sequences")
    loss, metrics = _PolicyLoss.apply(logprobs, batch, config)  # type: ignore[no-untyped-call]
    return PolicyLossOutput(loss, dict(zip(METRICS, metrics.unbind(), strict=True)))


def _batch(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Batch:
    """Everything as (rows, width), the dtypes as they came; raises ValueError for shapes that do not fit."""
    if new.dim() not in (1, 2) or new.shape != old.shape or new.shape != mask.shape:
        raise ValueError(
            "logprobs, old_logprobs and mask must share one shape, (B, T) or packed (T,), not "
            f"{tuple(new.shape)}, {tuple(old.shape)} and {tuple(mask.shape)}"
        )
    if not new.is_floating_point():
        raise ValueError(f"logprobs must be floats, not {new.dtype}")
    if {old.device, advantages.device, mask.device} != {new.device}:
        raise ValueError(
            f"all tensors must be on {new.device} with the logprobs, not on {old.device}, {advantages.device} and "
            f"{mask.device}"
        )
    rows, width = new.shape if new.dim() == 2 else (1, new.numel())
    sequences = _sequences(new, cu_seqlens)
    return Batch(
        new=new.reshape(rows, width),
        old=old.reshape(rows, width),
        advantages=_advantages(advantages, new, sequences),
        mask=(mask if mask.dtype is torch.bool else mask != 0).reshape(rows, width),
        sequences=sequences,
        floor=stored_floor(old.dtype),
    )


def _sequences(new: Tensor, cu_seqlens: Tensor | None) -> Sequences | None:
    if cu_seqlens is None:
        return PaddedSequences(new.shape[0]) if new.dim() == 2 else None
    if new.dim() == 2:
        raise ValueError(f"cu_seqlens belongs to a packed batch, not to logprobs of shape {tuple(new.shape)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens must be (S + 1,) integers, S >= 1, not {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        )
    return PackedSequences(cu_seqlens.numel() - 1, cu_seqlens, sequence_ids(cu_seqlens, new.numel()))


def _advantages(advantages: Tensor, new: Tensor, sequences: Sequences | None) -> Tensor:
    """(rows, width) where they came one for each token, else (sequences, 1)."""
    if advantages.shape == new.shape:
        return advantages if new.dim() == 2 else advantages.unsqueeze(0)
    number = sequences.number if sequences is not None else None
    if tuple(advantages.shape) in ((number,), (number, 1)):
        return advantages.reshape(-1, 1)
    raise ValueError(
        "advantages must be (B,), (B, 1) or (B, T); packed (T,), or (S,) with cu_seqlens; not "
        f"{tuple(advantages.shape)} for logprobs {tuple(new.shape)}"
    )


class _PolicyLoss(torch.autograd.Function):
    """The gradient is known when the loss is: backward only scales it."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, batch: Batch, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
        fused = _can_fuse(logprobs)
        evaluation = _evaluate_fused(batch, config) if fused else evaluate(_as_float32(batch), config)
        ctx.save_for_backward(evaluation.gradient, evaluation.scale)
        ctx.like = logprobs.shape, logprobs.dtype
        ctx.mark_non_differentiable(evaluation.metrics)
        return evaluation.loss, evaluation.metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        gradient, scale = ctx.saved_tensors
        shape, dtype = ctx.like
        # Out of place: with retain_graph the same gradient is scaled again.
        scaled = gradient * (grad_loss * scale)
        if scaled.dtype is not dtype or scaled.shape != shape:
            scaled = scaled.to(dtype).view(shape)
        return scaled, None, None


def _as_float32(batch: Batch) -> Batch:
    return replace(batch, new=batch.new.float(), old=batch.old.float(), advantages=batch.advantages.float())


def _can_fuse(logprobs: Tensor) -> bool:
    """Under torch.compile the plain path is traced, and fused by the compiler; some CUDA builds come without Triton."""
    return logprobs.is_cuda and logprobs.numel() > 0 and not torch.compiler.is_compiling() and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _evaluate_fused(batch: Batch, config: PolicyLossConfig) -> Evaluation:
    # Imported here: the module needs Triton, which a CPU installation lacks.
    from trainer_hooks import fused

    return fused.evaluate(batch, config)
