"""Owns which token belongs to which sequence, in padded and packed batches: sum over a sequence, spread back to tokens.

Tokens are (rows, width): a padded batch has a row for each sequence, a packed one a single row. Nothing here knows a
loss or a mask, and nothing depends on a value that would have to be read from the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PaddedSequences:
    """A padded batch: each row is a sequence."""

    number: int

    def sum(self, tokens: Tensor) -> Tensor:
        """(rows, width) to (rows, 1) in float32, or in the tokens' own floating dtype."""
        return tokens.sum(-1, keepdim=True, dtype=tokens.dtype if tokens.is_floating_point() else torch.float32)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """(rows, 1) to something that broadcasts over (rows, width)."""
        return per_sequence


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """One row that holds all sequences one after the other."""

    number: int
    boundaries: Tensor
    """(sequences + 1,) where each begins, and where the last one ends."""
    ids: Tensor
    """(width,) int32, the sequence of each token."""

    def sum(self, tokens: Tensor) -> Tensor:
        """(1, width) to (sequences, 1) in float32, or in the tokens' own floating dtype."""
        flat = tokens.reshape(-1)
        flat = flat if flat.is_floating_point() else flat.float()
        return flat.new_zeros(self.number).index_add_(0, self.ids, flat).unsqueeze(-1)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """(sequences, 1) to (1, width)."""
        return per_sequence.reshape(-1).index_select(0, self.ids).unsqueeze(0)


Sequences = PaddedSequences | PackedSequences


def sequence_ids(cu_seqlens: Tensor, width: int) -> Tensor:
    """The sequence of each of `width` packed tokens, int32: boundaries [0, 2, 5] give [0, 0, 1, 1, 1].

    A token past the last boundary counts to the last sequence, so that no index can leave its range.
    """
    positions = torch.arange(width, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    ids = torch.searchsorted(cu_seqlens[1:], positions, right=True, out_int32=True)
    return ids.clamp_(max=cu_seqlens.numel() - 2)
