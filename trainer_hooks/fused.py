"""Owns the launches of the Triton kernels: grids, buffers, order. It decides nothing about the loss.

Nothing is read back and every size follows from shapes, so that a CUDA graph can capture it. Triton is imported with
this module, and this module only when a loss is computed on a GPU.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

from trainer_hooks.config import PolicyLossConfig, log_bounds
from trainer_hooks.kernels import PARTIALS, finish_kernel, sequence_kernel, token_kernel
from trainer_hooks.masking import POSITIVE_TOLERANCE
from trainer_hooks.objective import METRICS, Batch, Evaluation
from trainer_hooks.sequences import PackedSequences

BLOCK = 1024
STEPS = 8  # blocks that a program walks through: one reduction for 8,192 tokens
_MAX_SPLITS = 64
# 8 warps leave each thread 4 tokens, one vector load of float32. Fusing a product with a sum rounds once, not twice;
# said outright, since the default differs between Triton versions, and so would the last bit.
LAUNCH = {"num_warps": 8, "enable_fp_fusion": True}


def evaluate(batch: Batch, config: PolicyLossConfig) -> Evaluation:
    """As `objective.evaluate`, for tensors on one GPU in any floating dtypes; computed in float32."""
    new, old, mask = batch.new.contiguous(), batch.old.contiguous(), batch.mask.contiguous().view(torch.uint8)
    advantages, sequences = batch.advantages.contiguous(), batch.sequences
    token_advantages = sequences is None or advantages.shape == new.shape
    number = 1 if sequences is None else sequences.number
    gspo, packed = config.loss == "gspo", isinstance(sequences, PackedSequences)
    bounds = log_bounds(config)
    gradient = torch.empty_like(new, dtype=torch.float32)
    columns = triton.cdiv(new.numel(), BLOCK * STEPS)
    partials = torch.empty((PARTIALS, columns), dtype=torch.float32, device=new.device)
    with _on_device_of(new):
        needs_sums = gspo or config.per_sequence_mean
        sums = _sequence_sums(batch, new, old, advantages, mask, config) if needs_sums else partials
        token_kernel[(columns,)](
            new, old, advantages, mask, sequences.ids if isinstance(sequences, PackedSequences) else mask, sums,
            gradient, partials, new.numel(), new.shape[-1], number, batch.floor, POSITIVE_TOLERANCE,
            bounds.low, bounds.high, bounds.dual, bounds.bound,
            CISPO=config.loss == "cispo", GSPO=gspo, SEQUENCE_MEAN=config.per_sequence_mean,
            DROP=config.unscorable == "drop", PACKED=packed, TOKEN_ADVANTAGES=token_advantages,
            BLOCK=BLOCK, STEPS=STEPS, **LAUNCH,
        )  # fmt: skip
        loss, scale, metrics = _finish(partials, number, config)
    return Evaluation(loss, gradient, scale, metrics)


def _sequence_sums(
    batch: Batch, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, config: PolicyLossConfig
) -> Tensor:
    """(1 or 5, sequences): see the sequence kernel. Long sequences are split, so that few of them fill the device."""
    sequences, ratio = batch.sequences, config.loss == "gspo"
    assert sequences is not None
    packed = isinstance(sequences, PackedSequences)
    mean_length = triton.cdiv(new.numel(), sequences.number)
    splits = min(_MAX_SPLITS, triton.cdiv(mean_length, BLOCK * STEPS))
    rows = 5 if ratio else 1
    sums = torch.empty((splits, rows, sequences.number), dtype=torch.float32, device=new.device)
    sequence_kernel[(sequences.number, splits)](
        new, old, advantages, mask, sequences.boundaries if isinstance(sequences, PackedSequences) else mask, sums,
        new.shape[-1], sequences.number, batch.floor, POSITIVE_TOLERANCE, config.log_ratio_bound,
        RATIO=ratio, PACKED=packed, TOKEN_ADVANTAGES=advantages.shape == new.shape, ROWS=rows, BLOCK=BLOCK,
        **LAUNCH,
    )  # fmt: skip
    return sums[0] if splits == 1 else sums.sum(0)


def _finish(partials: Tensor, number: int, config: PolicyLossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, scale and metrics from the partial sums; a denominator on the device is read there."""
    tiny = torch.finfo(torch.float32).tiny
    # Each a tensor of its own: a view among a Function's outputs forbids `loss /= steps`.
    loss, scale, metrics = (
        torch.empty(shape, dtype=torch.float32, device=partials.device) for shape in ((), (), (len(METRICS),))
    )
    given, pointer, denominator = False, partials, 1.0
    match config.denominator:
        case Tensor() as tensor if tensor.device == partials.device:
            given, pointer = True, tensor.detach()
        case Tensor() as tensor:
            denominator = max(float(tensor), tiny)
        case None if config.loss == "dr_grpo":
            assert config.max_length is not None
            denominator = float(number * config.max_length)
        case None:
            denominator = float(number)
        case explicit:
            denominator = float(explicit)
    counted = config.denominator is None and config.loss in ("dapo", "bnpo", "cispo")
    finish_kernel[(1,)](
        partials, pointer, loss, scale, metrics, partials.shape[1], denominator, tiny,
        COUNTED=counted, GIVEN=given, BLOCK=BLOCK, **LAUNCH,
    )  # fmt: skip
    return loss, scale, metrics


def _on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's. On the CPU (interpreter) there is none."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
