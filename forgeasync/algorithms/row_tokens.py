"""The tokens of a packed row as formulas see them, and ratios of probabilities that stay finite.

Modules of this package call methods of tensors and import torch only for type checkers: a run's config
consists of their classes, and importing torch would cost seconds in every process that reads it, such as
scoring workers.

Shape suffixes: T trained tokens (targets) of a row, K ids of each token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch


_LEFT_OUT = cast("torch.Tensor", None)
"""Default of a tensor that ``__post_init__`` makes in the shape of the others."""

MAX_LOG_RATIO = 20.0
"""Largest exponent of a ratio: e^20 is beyond every sensible cap. In float32 exp() overflows above 88, which
a product over thousands of tokens reaches."""


def capped(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """Compute min(log ratio, ``MAX_LOG_RATIO``), with the gradient of the log ratio itself.

    Its exp() and the gradient of that equal the ratio up to e^20, and e^20 beyond. Infinity would become NaN
    when multiplied by 0: an advantage of 0, or the gradient of a clipped value.
    """
    excess_T = (log_ratio_T.detach() - MAX_LOG_RATIO).clamp(min=0.0)
    return log_ratio_T - excess_T


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTokens:
    """What a teacher says of the tokens of a row, and the student of the same ids.

    All are float32; log-probabilities are over the full vocabulary at temperature 1. K is the largest number
    of ids that a term of the loss looks at, and may be 0. Where the teacher was not asked all values are
    finite, and count for nothing.
    """

    logprobs_T: torch.Tensor
    """The teacher's, of the sampled tokens."""
    topk_TK: torch.Tensor
    """The teacher's, of its K most likely ids, the likeliest first; or of those that the policy could have
    drawn, then -inf where these are fewer than K."""
    student_topk_TK: torch.Tensor
    """The student's, of these ids, with gradients; -inf where there is no id."""
    versions_T: torch.Tensor = field(default=_LEFT_OUT)
    """float32: which version of the teacher's weights has seen the token; all 0 if it is left out."""
    is_asked_T: torch.Tensor = field(default=_LEFT_OUT)
    """bool: whether the teacher was asked about the token; all True if it is left out."""

    def __post_init__(self) -> None:
        ones_T = _ones_like(self.logprobs_T)
        if self.versions_T is None:
            object.__setattr__(self, "versions_T", 0.0 * ones_T)
        if self.is_asked_T is None:
            object.__setattr__(self, "is_asked_T", ones_T.bool())


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokens:
    """The tokens of a packed row that a loss is computed from; every tensor has shape [T].

    Values outside ``mask_T`` may be anything, even nan, except in ``logprobs_T``, which is always finite. The
    tokens of a sequence are contiguous.
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
    sample_weights_T: torch.Tensor = field(default=_LEFT_OUT)
    """float32; how often the token's sequence counts in the batch (rollout accounting); all 1 if it is left
    out."""
    ref_logprobs_T: torch.Tensor | None = None
    """float32, under the model that the run started from; None if the loss has no KL penalty."""
    proximal_logprobs_T: torch.Tensor | None = None
    """float32, under the policy at the start of the batch; None if that is the current policy, or if the
    objective does not need it (``Objective.needs_proximal``)."""
    full_logprobs_T: torch.Tensor | None = None
    """float32, under the current policy over the full vocabulary at temperature 1, with gradients; None if
    the loss has no terms."""
    teacher: TeacherTokens | None = None
    """None if no term of the loss needs a teacher."""

    def __post_init__(self) -> None:
        if self.sample_weights_T is None:
            object.__setattr__(self, "sample_weights_T", _ones_like(self.logprobs_T))

    def taught(self) -> RowTokens:
        """The same row, masked to tokens that its teacher was asked about."""
        assert self.teacher is not None
        return replace(self, mask_T=self.mask_T & self.teacher.is_asked_T)

    def masked(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the values, and 0 without a gradient where ``mask_T`` is False."""
        return values_T.where(self.mask_T, 0.0)

    def log_ratios(self) -> torch.Tensor:
        """Compute log(current / behavior) of every token [T], with gradients; 0 where masked out."""
        return self.masked(self.logprobs_T - self.behavior_logprobs_T)

    def sequence_sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """For every token [T] the sum of its sequence's masked values; differentiable."""
        return sequence_sums(values_T, self.mask_T, self.sequence_ids_T)

    def sequence_means(self, values_T: torch.Tensor) -> torch.Tensor:
        """For every token [T] the mean of its sequence's masked values; 0 where nothing is masked in."""
        return sequence_means(values_T, self.mask_T, self.sequence_ids_T)


def _ones_like(logprobs_T: torch.Tensor) -> torch.Tensor:
    """Ones [T] in float32, whose sums are exact also where log-probabilities are in bfloat16."""
    return logprobs_T.new_ones(logprobs_T.shape).float()


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
    # Masked-out values may be anything, even nan.
    return sums_S.index_add(0, index_T, values_T.where(mask_T, 0.0)), index_T


def num_sequences(
    mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, weights_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Count the sequences with at least one token masked in; float32 scalar.

    With ``weights_T`` [T], the same for all tokens of a sequence, each sequence counts by its weight.
    """
    ids_S, index_N = sequence_ids_T[mask_T].unique(return_inverse=True)
    if weights_T is None:
        return ids_S.new_tensor(len(ids_S)).float()
    weights_S = weights_T.new_zeros(len(ids_S)).scatter_reduce(0, index_N, weights_T[mask_T], "amax")
    return weights_S.sum()
