"""Compares the Triton path with the plain one, on a GPU or, with TRITON_INTERPRET=1, on the CPU.

`python tests/kernel_parity.py` prints how many cases agreed.
"""

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from trainer_hooks import PolicyLossConfig
from trainer_hooks.loss import _as_float32, _batch
from trainer_hooks.objective import Evaluation, evaluate

LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo")
UNSCORABLE = (math.nan, math.inf, -math.inf, -9999.0, -1e30, 9999.0, 0.5)
SMALL = (3, 70)  # wider than one split of a sequence in small blocks
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"clip_ratio_c": 1.5, "clip_high": 0.28, "unscorable": "drop"},
    {"denominator": 7.0, "clip_low": 1.0, "log_ratio_bound": 0.5},
    {"denominator": torch.tensor(7.0)},
)


class Case(NamedTuple):
    name: str
    config: PolicyLossConfig
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    cu_seqlens: Tensor | None


def tokens(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every kind of token: unscorable, clipped, beyond the bound, masked with garbage, a row all masked."""
    generator = torch.Generator().manual_seed(seed)
    new = -2.0 * torch.rand(rows, width, generator=generator)
    old = (new + 0.4 * torch.randn(rows, width, generator=generator)).clamp(max=0.0)
    kinds = torch.randint(0, 4 * len(UNSCORABLE), (rows, width), generator=generator)
    for kind, value in enumerate(UNSCORABLE):
        old = torch.where(kinds == kind, value, old)
    old = torch.where(kinds == len(UNSCORABLE), new + 25.0 - 50.0 * (new < -1.0), old)
    advantages = torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.8
    if rows > 1:
        mask[rows // 2] = False
    new, old, advantages = (torch.where(mask, x, fill) for x, fill in ((new, math.nan), (old, 3.0), (advantages, 1e30)))
    return new.to(dtype), old.to(dtype), advantages, mask


def cases(shapes: list[tuple[int, int]], device: str) -> Iterator[Case]:
    for i, (loss, options, (rows, width), kind, packed) in enumerate(
        itertools.product(LOSSES, OPTIONS, shapes, ("row", "token"), (False, True))
    ):
        dtype = (torch.float32, torch.float32, torch.bfloat16, torch.float16)[i % 4]
        new, old, advantages, mask = (x.to(device) for x in tokens(rows, width, dtype, i))
        if kind == "row":
            advantages = advantages.where(mask, 0.0).sum(-1)
        chosen = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
        config = PolicyLossConfig(loss=cast(Any, loss), max_length=50, **chosen)
        boundaries = None
        if packed:
            cuts = sorted({0, rows * width, *(b * width for b in range(rows)), width // 3})
            cuts.insert(1, 0)  # a sequence without tokens
            boundaries = torch.tensor(cuts, dtype=torch.int32, device=device)
            new, old, mask = (x.reshape(-1) for x in (new, old, mask))
            advantages = advantages.reshape(-1) if kind == "token" else torch.arange(len(cuts) - 1.0, device=device) - 1
        name = f"{i}: {loss} {options} {rows}x{width} {kind} {'packed' if packed else 'padded'} {dtype}"
        yield Case(name, config, (new, old, advantages, mask), boundaries)


def check(case: Case) -> Evaluation:
    """Raises AssertionError, naming the case, where the two paths disagree; else the fused result."""
    from trainer_hooks import fused

    batch = _batch(*case.tensors, case.cu_seqlens)
    plain, quick = evaluate(_as_float32(batch), case.config), fused.evaluate(batch, case.config)
    derivative = (plain.gradient * plain.scale).broadcast_to(quick.gradient.shape)
    # exp(20) times an advantage may be among the summands: what is small beside it is lost in float32.
    slack = 1e-6 * max(1.0, abs(plain.loss.item()))

    def close(name: str, got: Tensor, wanted: Tensor, rtol: float, atol: float) -> None:
        torch.testing.assert_close(
            got, wanted, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{name} of {case.name}: {text}"
        )

    close("loss", quick.loss, plain.loss, 1e-5, 10.0 * slack)
    close("gradient", quick.gradient * quick.scale, derivative, 1e-5, 1e-6)
    close("metrics", quick.metrics, plain.metrics, 1e-5, 1e-6)
    return quick


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    from trainer_hooks import fused

    # Small blocks: every loop runs more than once, and the last block is cut, on a few tokens.
    fused.BLOCK, fused.STEPS = 32, 2
    agreed = 0
    for case in cases([SMALL], "cpu"):
        check(case)
        agreed += 1
    new, old, advantages, mask = tokens(*SMALL, torch.float32, 0)
    new = torch.where(mask & (torch.arange(SMALL[1]) == 5), math.nan, new)
    for loss in LOSSES:  # a broken policy is seen in the same places
        config = PolicyLossConfig(loss=cast(Any, loss), max_length=50)
        assert check(Case(f"NaN in {loss}", config, (new, old, advantages, mask), None)).loss.isnan()
        agreed += 1
    print(f"{agreed} cases agree")


if __name__ == "__main__":
    main()
