"""The tokens of a packed row as formulas see them, and how ratios of probabilities stay numbers.

Modules of this package use methods of tensors and import torch only for type checkers: a run's config is
made of their classes, and processes that read it (the scoring workers among them) would pay seconds for
torch.

Shape suffix: T trained tokens (targets) of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
if TYPE_CHECKING:
    import torch


MAX_LOG_RATIO = 20.0
"""Largest exponent of a ratio: e^20 is beyond every sensible cap. float32 has no exp() of more than 88, and a
product over thousands of tokens reaches that."""


def capped(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """min(log ratio, ``MAX_LOG_RATIO``), with the gradient of the log ratio itself.

    exp() of it and that gradient are the ratio's own up to e^20 and e^20 beyond. Infinity would become NaN
    wherever it meets a 0: an advantage of 0, or the gradient of what a clip holds back.
    """
    excess_T = (log_ratio_T.detach() - MAX_LOG_RATIO).clamp(min=0.0)
    return log_ratio_T - excess_T


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokens:
    """The tokens of a packed row that a loss is made of, each of shape [T].

    Tokens outside of ``mask_T`` may hold anything, also nan, except in ``logprobs_T``, which is always
    finite. The tokens of a sequence lie side by side.
    """

    logprobs_T: torch.Tensor
    """float32, under the current policy, with gradients."""
    behavior_logprobs_T: torch.Tensor
    """float32, under the policy that sampled the token, as recorded when it was sampled."""
    advantages_T: torch.Tensor
    """float32; the same for all tokens of a sequence unless steps are rewarded or a KL penalty is in the
    reward."""
    mask_T: torch.Tensor
    """bool; False for tokens that are not trained on."""
    sequence_ids_T: torch.Tensor
    """int64; tokens of one response share an id."""
    ages_T: torch.Tensor
    """int32, in policy versions between sampling and this step."""
    sample_weights_T: torch.Tensor
    """float32; how often the token's sequence counts in the batch (rollout accounting)."""
    ref_logprobs_T: torch.Tensor | None = None
    """float32, under the model that the run started from; None where the loss has no KL penalty."""
    proximal_logprobs_T: torch.Tensor | None = None
    """float32, under the policy at the start of the batch; None where that is the current policy or where the
    objective does not ask for it (``Objective.needs_proximal``)."""

    def masked(self, values_T: torch.Tensor) -> torch.Tensor:
        """The values, and 0 without a gradient where ``mask_T`` is False."""
        return values_T.where(self.mask_T, 0.0)

    def log_ratios(self) -> torch.Tensor:
        """log(current / behavior) of every token [T], with gradients; 0 where masked out."""
        return self.masked(self.logprobs_T - self.behavior_logprobs_T)

    def sequence_sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """For every token [T] the sum of its sequence's masked values; differentiable."""
        return sequence_sums(values_T, self.mask_T, self.sequence_ids_T)

    def sequence_means(self, values_T: torch.Tensor) -> torch.Tensor:
        """For every token [T] the mean of its sequence's masked values; 0 where nothing is masked in."""
        return sequence_means(values_T, self.mask_T, self.sequence_ids_T)


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
