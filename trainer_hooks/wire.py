"""Owns the way from logprobs as they came in JSON to float32 tensors with NaN at every unscorable position.

It never drops, shifts or fills a value: as many come out as went in. What is unscorable is decided in `masking`.
"""

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from trainer_hooks.masking import mark_unscorable

# How the "string" encoding spells what JSON has no number for (the proto3 JSON mapping).
_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def decode_logprobs(
    values: Sequence[object] | Tensor, *, device: torch.device | str | None = None, length: int | None = None
) -> Tensor:
    """The logprobs of one completion as (T,) float32, NaN where one is unscorable.

    Takes every form in which the sidecar or an engine writes them: numbers, None, NaN, "NaN", "Infinity", the floor
    -9999.0 and below, 9999.0 and any other number over the tolerance. [-0.5, None, 9999.0] gives [-0.5, nan, nan].
    With `length`, the number of sampled tokens, another number of values is refused: their alignment is unknown.

    Raises ValueError, with the position, for a value that is no logprob in any of those forms.
    """
    if isinstance(values, Tensor):
        values = values.tolist()
    if length is not None and len(values) != length:
        raise ValueError(f"{len(values)} logprobs for {length} sampled tokens: which belongs to which is unknown")
    numbers = [value if type(value) is float else _number(value, i) for i, value in enumerate(values)]
    # Judged as doubles: 1.0000000001e-3 and -9998.99999 are on the other side once they are float32.
    return mark_unscorable(torch.tensor(numbers, dtype=torch.float64)).to(device=device, dtype=torch.float32)


def pad_logprobs(
    rows: Sequence[Sequence[object] | Tensor],
    *,
    device: torch.device | str | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """The logprobs of B completions as (B, T) float32, T the longest, padded at the end with NaN; else as
    `decode_logprobs`. With `lengths`, the sampled tokens of each, every row must have as many values.

    Raises ValueError, with row and position.
    """
    if lengths is not None and len(lengths) != len(rows):
        raise ValueError(f"{len(lengths)} lengths for {len(rows)} rows of logprobs")
    decoded = [_decode_row(row, i, None if lengths is None else lengths[i]) for i, row in enumerate(rows)]
    padded = torch.full((len(decoded), max(map(len, decoded), default=0)), torch.nan)
    for target, row in zip(padded, decoded, strict=True):
        target[: len(row)] = row
    return padded.to(device)


def _decode_row(row: Sequence[object] | Tensor, index: int, length: int | None) -> Tensor:
    try:
        return decode_logprobs(row, length=length)
    except ValueError as error:
        raise ValueError(f"row {index}: {error}") from error


def _number(value: object, position: int) -> float:
    match value:
        case None:
            return math.nan
        case bool():
            pass
        case str() if value in _SPELLED:
            return _SPELLED[value]
        case Real():
            try:
                return float(value)
            except OverflowError:
                return math.inf
    raise ValueError(f"logprob {position} is {value!r}, which is no number and stands for none")
