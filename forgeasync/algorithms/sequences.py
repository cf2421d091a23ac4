"""Sums over the sequences of a packed batch, given back to every token of them.

Shape suffixes: T packed tokens, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def sequence_sums(values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor) -> torch.Tensor:
    """For every token [T] the sum of its sequence's masked values; differentiable."""
    sums_S, index_T = _sums(values_T, mask_T, sequence_ids_T)
    return sums_S[index_T]


def sequence_means(
    values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
) -> torch.Tensor:
    """For every token [T] the mean of its sequence's masked values; 0 where nothing is masked in."""
    lengths_T = sequence_sums(values_T.new_ones(values_T.shape), mask_T, sequence_ids_T)
    return sequence_sums(values_T, mask_T, sequence_ids_T) / lengths_T.clamp(min=1.0)


def _sums(
    values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ids_S, index_T = sequence_ids_T.unique(return_inverse=True)
    sums_S = values_T.new_zeros(len(ids_S))
    # What is masked out may be anything, nan too.
    return sums_S.index_add(0, index_T, values_T.where(mask_T, 0.0)), index_T


def num_sequences(
    mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, weights_T: torch.Tensor | None = None
) -> torch.Tensor:
    """How many sequences have at least one token masked in; float32 scalar.

    With ``weights_T`` [T], the same for all tokens of a sequence, each sequence counts that often.
    """
    ids_S, index_N = sequence_ids_T[mask_T].unique(return_inverse=True)
    if weights_T is None:
        return ids_S.new_tensor(len(ids_S)).float()
    weights_S = weights_T.new_zeros(len(ids_S)).scatter_reduce(0, index_N, weights_T[mask_T], "amax")
    return weights_S.sum()
