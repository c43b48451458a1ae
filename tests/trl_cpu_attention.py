"""Lets TRL 1.16's AsyncGRPOTrainer run on a CPU: its one GPU-only kernel, replaced by the same maths in torch.

Tree packing, the attention named "tree_fa3", the collator and the loss all stay TRL's. Runs in TRL's own environment.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    # The constructor asks CUDA for the device's name to report MFU, even where torch is a CPU build.
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None


def flash_attn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **_other: Any,
) -> Tensor:
    """Causal attention of each segment, (tokens, heads, head_dim), its queries aligned with the last of its keys."""
    assert causal
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = query.shape[1] // key.shape[1]
    ends_q, ends_k = bounds_q.tolist(), bounds_k.tolist()
    outputs = []
    for i in range(len(ends_q) - 1):
        q = query[ends_q[i] : ends_q[i + 1]].transpose(0, 1)
        k = key[ends_k[i] : ends_k[i + 1]].transpose(0, 1).repeat_interleave(group, 0)
        v = value[ends_k[i] : ends_k[i + 1]].transpose(0, 1).repeat_interleave(group, 0)
        scores = (q.float() @ k.float().transpose(-1, -2)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        row = torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1])
        column = torch.arange(k.shape[1])[None, :]
        visible = column <= row
        if window_size[0] >= 0:
            visible &= column >= row - window_size[0]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outputs.append((weights @ v.float()).to(query.dtype).transpose(0, 1))
    return torch.cat(outputs)
