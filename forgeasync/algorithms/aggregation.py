"""From losses of tokens to the loss of a batch.

A batch is usually in pieces: microbatches, and data-parallel ranks. Given as ``total`` the ``count`` of the
whole batch, summed over the pieces, each piece's call gives its share of the batch's number, and the shares
add up.
Without ``total`` a piece is taken for the whole. Sequences without a token masked in do not count.

``weights_T`` says how often each sequence counts, the same number for all of its tokens; None is 1 for all.
Weights multiply values and the count alike, so that a batch's loss is the weighted mean, whatever they add up
to (the self-normalized estimator: Owen, "Monte Carlo theory, methods and examples", 2013, section 9.2).

Shape suffix: T packed tokens; values and weights are float32, the mask is bool.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from forgeasync.algorithms.sequences import num_sequences, sequence_sums


class Aggregation(Protocol):
    """A weighted sum of the values of tokens, divided by a count of the batch."""

    def __call__(
        self,
        *,
        values_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
        weights_T: torch.Tensor | None = None,
        total: torch.Tensor | float | None = None,
    ) -> torch.Tensor: ...

    def count(
        self, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, weights_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What this piece adds to ``total``."""
        ...


@dataclass(frozen=True, slots=True)
class _Aggregation:
    """``summed`` gives the numerator, ``counted`` the denominator of a piece."""

    summed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    counted: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

    def __call__(
        self,
        *,
        values_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
        weights_T: torch.Tensor | None = None,
        total: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        if total is None:
            total = self.count(mask_T, sequence_ids_T, weights_T)
        if weights_T is not None:
            values_T = values_T * weights_T
        numerator = self.summed(values_T, mask_T, sequence_ids_T)
        return numerator / torch.as_tensor(total, dtype=numerator.dtype).clamp(min=1.0)

    def count(
        self, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, weights_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What this piece adds to ``total``."""
        return self.counted(mask_T, sequence_ids_T, weights_T)


def _masked_sum(values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor) -> torch.Tensor:
    return torch.where(mask_T, values_T, 0.0).sum()


def _num_tokens(
    mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, weights_T: torch.Tensor | None
) -> torch.Tensor:
    return mask_T.sum().float() if weights_T is None else torch.where(mask_T, weights_T, 0.0).sum()


def _sum_of_means(values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor) -> torch.Tensor:
    # A sequence's mean, dealt out to its tokens in equal parts.
    lengths_T = sequence_sums(torch.ones_like(values_T), mask_T, sequence_ids_T)
    return (torch.where(mask_T, values_T, 0.0) / lengths_T.clamp(min=1.0)).sum()


token_mean: Aggregation = _Aggregation(_masked_sum, _num_tokens)
"""Every token weighs the same. Source: Yu et al., "DAPO", 2025, equation 8."""

sequence_mean_of_token_mean: Aggregation = _Aggregation(_sum_of_means, num_sequences)
"""Every sequence weighs the same. Source: Shao et al., "DeepSeekMath", 2024, equation 3."""

sequence_mean_of_token_sum: Aggregation = _Aggregation(_masked_sum, num_sequences)
"""The sum over a sequence's tokens, mean over sequences: the policy gradient itself."""


def constant_length(length: int) -> Aggregation:
    """The sum over a sequence's tokens divided by a constant, mean over sequences.

    Source: Liu et al., "Understanding R1-Zero-Like Training", 2025 (Dr. GRPO: the generation budget).

    Raises:
        ValueError: the length is not positive.
    """
    if length < 1:
        raise ValueError(f"constant_length: length = {length}; must be at least 1")

    def summed(values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor) -> torch.Tensor:
        return _masked_sum(values_T, mask_T, sequence_ids_T) / length

    return _Aggregation(summed, num_sequences)
