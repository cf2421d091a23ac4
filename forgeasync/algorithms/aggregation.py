"""Aggregations: reductions of the losses of tokens to the loss of a batch.

A batch is usually split into pieces: microbatches and data-parallel ranks. If ``total`` is the sum of
``count`` over all pieces of the batch, each piece's call returns its share of the batch's loss, and the
shares add up. Without ``total``, the piece counts as the whole batch. Sequences without a trained token do
not count.

``weights_T`` is the weight of each sequence, the same number for all of its tokens; None means 1 for all.
Weights multiply both the values and the count, so a batch's loss is the weighted mean whatever the weights
add up to (the self-normalized estimator: Owen, "Monte Carlo theory, methods and examples", 2013, section
9.2).

Shape suffix: T packed tokens; values and weights are float32, the mask is bool.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from forgeasync.algorithms.own_results import WrongResult, check_scalar
from forgeasync.algorithms.row_tokens import num_sequences, sequence_sums
from forgeasync.schema import OWN_INSTANCE, Count, PythonCode, Section, build_code

if TYPE_CHECKING:
    import torch


class Aggregation(Section):
    """Base class of aggregations: a sum over tokens (``summed``), divided by a count (``count``).

    To define your own aggregation, write a class like those below. It needs both methods, because the count
    of a batch is summed over all pieces before the first loss is computed:

        import forgeasync as fa


        class ScaledMean(fa.Aggregation):
            '''The mean over all tokens of the batch, times a constant.'''

            scale: float = 1.0

            def summed(self, values_T, mask_T, sequence_ids_T):
                return self.scale * values_T.where(mask_T, 0.0).sum()

            def count(self, mask_T, sequence_ids_T, weights_T=None):
                return mask_T.sum() if weights_T is None else weights_T.where(mask_T, 0.0).sum()

    To train with it, set ``aggregation: {kind: python, factory: my_losses.ScaledMean, options: {scale:
    10}}``.
    """

    @abstractmethod
    def summed(
        self, values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
    ) -> torch.Tensor:
        """Return the numerator, a scalar.

        Args:
            values_T: Losses of tokens, weighted. Where ``mask_T`` is False they may be nan.
            mask_T: Whether each token is trained on, bool.
            sequence_ids_T: Ids of sequences, int64. The tokens of one response share an id.
        """

    @abstractmethod
    def count(
        self, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, weights_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return this piece's contribution to the denominator ``total``, a scalar.

        Args:
            mask_T: Whether each token is trained on, bool.
            sequence_ids_T: Ids of sequences, int64. The tokens of one response share an id.
            weights_T: Weight of each token's sequence, float32. None: 1 for all.
        """

    def __call__(
        self,
        *,
        values_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
        weights_T: torch.Tensor | None = None,
        total: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """Return a piece's share of the batch's loss, a scalar, differentiable in ``values_T``.

        Args:
            values_T: Losses of tokens.
            mask_T: Whether each token is trained on, bool.
            sequence_ids_T: Ids of sequences, int64.
            weights_T: Weight of each token's sequence, float32. None: 1 for all.
            total: Sum of ``count`` over all pieces of the batch. None: the piece is the whole batch.
        """
        import torch

        if total is None:
            total = self.count(mask_T, sequence_ids_T, weights_T)
        if weights_T is not None:
            values_T = values_T * weights_T
        numerator = self.summed(values_T, mask_T, sequence_ids_T)
        return numerator / torch.as_tensor(total, dtype=numerator.dtype).clamp(min=1.0)


class TokenMean(Aggregation):
    """Mean over all tokens of the batch. Source: Yu et al., "DAPO", 2025, equation 8."""

    kind: Literal["token_mean"] = "token_mean"

    def summed(
        self, values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
    ) -> torch.Tensor:
        return values_T.where(mask_T, 0.0).sum()

    def count(
        self, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, weights_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        return mask_T.sum().float() if weights_T is None else weights_T.where(mask_T, 0.0).sum()


class _SequenceAggregation(Aggregation):
    """Base class of aggregations that divide by the number of sequences."""

    def count(
        self, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, weights_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        return num_sequences(mask_T, sequence_ids_T, weights_T)


class SequenceMeanOfTokenMean(_SequenceAggregation):
    """Mean over each sequence's tokens, then over sequences.

    Source: Shao et al., "DeepSeekMath", 2024, equation 3.
    """

    kind: Literal["sequence_mean_of_token_mean"] = "sequence_mean_of_token_mean"

    def summed(
        self, values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
    ) -> torch.Tensor:
        # Each token contributes its share of its sequence's mean.
        lengths_T = sequence_sums(values_T.new_ones(values_T.shape), mask_T, sequence_ids_T)
        return (values_T.where(mask_T, 0.0) / lengths_T.clamp(min=1.0)).sum()


class SequenceMeanOfTokenSum(_SequenceAggregation):
    """Sum over each sequence's tokens, then mean over sequences: the unmodified policy gradient.

    Source: Williams, "Simple Statistical Gradient-Following Algorithms", 1992.
    """

    kind: Literal["sequence_mean_of_token_sum"] = "sequence_mean_of_token_sum"

    def summed(
        self, values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
    ) -> torch.Tensor:
        return values_T.where(mask_T, 0.0).sum()


class ConstantLength(_SequenceAggregation):
    """Sum over each sequence's tokens divided by a constant, then mean over sequences.

    Source: Liu et al., "Understanding R1-Zero-Like Training", 2025 (Dr. GRPO: the generation budget).
    """

    kind: Literal["constant_length"] = "constant_length"
    length: Count
    """Constant divisor in tokens, usually sampling.max_response_tokens."""

    def summed(
        self, values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
    ) -> torch.Tensor:
        return values_T.where(mask_T, 0.0).sum() / self.length


class PythonAggregation(PythonCode, Aggregation):
    """Your own aggregation, a subclass of ``Aggregation``, which has an example.

    A call raises ValueError if your code is not such a subclass, or its methods do not return scalars.
    """

    def summed(
        self, values_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor
    ) -> torch.Tensor:
        return check_scalar(self._own().summed(values_T, mask_T, sequence_ids_T), "summed")

    def count(
        self, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor, weights_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        return check_scalar(self._own().count(mask_T, sequence_ids_T, weights_T), "count")

    def _own(self) -> Aggregation:
        own = build_code(self, ("values_T", "mask_T", "sequence_ids_T"))
        if not isinstance(own, Aggregation):
            raise WrongResult(
                f"{self.factory} is a {type(own).__name__}; must be a subclass of forgeasync.Aggregation, "
                "with the methods summed and count"
            )
        return own


AnyAggregation = Annotated[
    TokenMean | SequenceMeanOfTokenMean | SequenceMeanOfTokenSum | ConstantLength | PythonAggregation,
    Field(discriminator="kind"),
    OWN_INSTANCE,
]
