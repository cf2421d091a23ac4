"""The tokens of a packed row as the input of formulas, and finite ratios of probabilities.

Modules of this package call methods of tensors and import torch only for type checkers. A run's config
consists of their classes, and importing torch would take seconds in every process that reads the config, such
as scoring workers.

Shape suffixes: T trained tokens (targets) of a row, K ids of each token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch


_LEFT_OUT = cast("torch.Tensor", None)
"""Default of tensors that ``__post_init__`` creates with the shape of the others."""

MAX_LOG_RATIO = 20.0
"""Largest log ratio. e^20 is beyond every sensible cap.

In float32, exp() overflows above 88, which the log ratio of thousands of tokens can reach.
"""


def capped(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """Return min(log ratio, ``MAX_LOG_RATIO``), with the gradient of the log ratio itself.

    So exp() of the result, and its gradient, equal the ratio up to e^20, and e^20 beyond. Infinity would
    become NaN when multiplied by 0, such as an advantage of 0 or the gradient of a clipped value.
    """
    excess_T = (log_ratio_T.detach() - MAX_LOG_RATIO).clamp(min=0.0)
    return log_ratio_T - excess_T


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTokens:
    """Log-probabilities of a teacher for the tokens of a row, and of the student for the same ids.

    All are float32, over the full vocabulary at temperature 1. K is the largest number of ids that a term of
    the loss uses, and may be 0. For tokens that the teacher did not score, all values are finite and unused.
    """

    logprobs_T: torch.Tensor
    """The teacher's log-probabilities of the sampled tokens."""
    topk_TK: torch.Tensor
    """The teacher's log-probabilities of K further ids at each token.

    Either the ids are its K most likely ones, the likeliest first, or those that the policy could have drawn,
    with -inf for missing ids.
    """
    student_topk_TK: torch.Tensor
    """The student's log-probabilities of the same ids, with gradients; -inf for missing ids."""
    versions_T: torch.Tensor = field(default=_LEFT_OUT)
    """Version of the teacher's weights that scored each token, float32. Default: all 0."""
    has_target_T: torch.Tensor = field(default=_LEFT_OUT)
    """Whether the teacher scored each token, bool. Default: all True."""

    def __post_init__(self) -> None:
        ones_T = _ones_like(self.logprobs_T)
        if self.versions_T is None:
            object.__setattr__(self, "versions_T", 0.0 * ones_T)
        if self.has_target_T is None:
            object.__setattr__(self, "has_target_T", ones_T.bool())


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokens:
    """Tokens of a packed row, from which a loss is computed. Every tensor has shape [T].

    Where ``mask_T`` is False, values may be anything, even nan, except in ``logprobs_T``, which is always
    finite. The tokens of a sequence are contiguous.
    """

    logprobs_T: torch.Tensor
    """Log-probabilities under the current policy, float32, with gradients."""
    behavior_logprobs_T: torch.Tensor
    """Log-probabilities under the policy that sampled the tokens, recorded during sampling, float32."""
    advantages_T: torch.Tensor
    """Advantages, float32.

    They are the same for all tokens of a sequence, unless steps have rewards or a KL penalty is in the
    reward.
    """
    mask_T: torch.Tensor
    """Whether each token is trained on, bool."""
    sequence_ids_T: torch.Tensor
    """Ids of sequences, int64. The tokens of one response share an id."""
    ages_T: torch.Tensor
    """Policy versions between the sampling of each token and this step, int32."""
    sample_weights_T: torch.Tensor = field(default=_LEFT_OUT)
    """Weight of each token's sequence in the batch (rollout accounting), float32. Default: all 1."""
    ref_logprobs_T: torch.Tensor | None = None
    """Log-probabilities under the run's initial model, float32; None if the loss has no KL penalty."""
    proximal_logprobs_T: torch.Tensor | None = None
    """Log-probabilities under the policy at the start of the batch, float32.

    None if that is the current policy, or if the objective does not need them
    (``Objective.needs_proximal``).
    """
    full_logprobs_T: torch.Tensor | None = None
    """Log-probabilities under the current policy over the full vocabulary at temperature 1, float32.

    They have gradients. None if the loss has no terms.
    """
    teacher: TeacherTokens | None = None
    """Values of the teacher; None if no term of the loss needs one."""

    def __post_init__(self) -> None:
        if self.sample_weights_T is None:
            object.__setattr__(self, "sample_weights_T", _ones_like(self.logprobs_T))

    def taught(self) -> RowTokens:
        """Return the row with ``mask_T`` limited to tokens that the teacher scored."""
        assert self.teacher is not None
        return replace(self, mask_T=self.mask_T & self.teacher.has_target_T)

    def masked(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the values, and 0 without a gradient where ``mask_T`` is False."""
        return values_T.where(self.mask_T, 0.0)

    def log_ratios(self) -> torch.Tensor:
        """Return log(current / behavior) of each token [T], with gradients; 0 where masked out."""
        return self.masked(self.logprobs_T - self.behavior_logprobs_T)

    def sequence_sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the sum of the masked values of each token's sequence, [T]; differentiable."""
        return sequence_sums(values_T, self.mask_T, self.sequence_ids_T)

    def sequence_means(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the mean of the masked values of each token's sequence, [T]; 0 if no token is masked in."""
        return sequence_means(values_T, self.mask_T, self.sequence_ids_T)


def _ones_like(logprobs_T: torch.Tensor) -> torch.Tensor:
    """Return ones [T] in float32, whose sums are exact even if log-probabilities are in bfloat16."""
    return logprobs_T.new_ones(logprobs_T.shape).float()


def sequence_sums(values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor) -> torch.Tensor:
    """Return the sum of the masked values of each token's sequence, [T]; differentiable."""
    sums_S, index_T = _sums(values_T, mask_T, sequence_ids_T)
    return sums_S[index_T]


def sequence_means(
    values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
) -> torch.Tensor:
    """Return the mean of the masked values of each token's sequence, [T]; 0 if no token is masked in."""
    lengths_T = sequence_sums(values_T.new_ones(values_T.shape), mask_T, sequence_ids_T)
    return sequence_sums(values_T, mask_T, sequence_ids_T) / lengths_T.clamp(min=1.0)


def _sums(
    values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ids_S, index_T = sequence_ids_T.unique(return_inverse=True)
    sums_S = values_T.new_zeros(len(ids_S))
    # Values that are masked out may be nan, so they are replaced and not multiplied by 0.
    return sums_S.index_add(0, index_T, values_T.where(mask_T, 0.0)), index_T


def num_sequences(
    mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, weights_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the number of sequences with at least one token masked in, a float32 scalar.

    With ``weights_T`` [T], the same for all tokens of a sequence, each sequence counts with its weight.
    """
    ids_S, index_N = sequence_ids_T[mask_T].unique(return_inverse=True)
    if weights_T is None:
        return ids_S.new_tensor(len(ids_S)).float()
    weights_S = weights_T.new_zeros(len(ids_S)).scatter_reduce(0, index_N, weights_T[mask_T], "amax")
    return weights_S.sum()
