"""The KL penalty towards a run's initial model, and its estimators.

The estimators estimate KL(current || reference) from sampled tokens, in nats per token. Except for the biased
``k2``, they are unbiased if the tokens are drawn from the current policy; ``unbiased_k3`` also if they are
not. Source of the names: Schulman, "Approximating KL Divergence", 2020. Ratios are at most e^20, in values
and gradients.

Shape suffix: T trained tokens of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from forgeasync.algorithms.own_results import check_estimates
from forgeasync.algorithms.row_tokens import RowTokens, capped, sequence_sums
from forgeasync.schema import OWN_INSTANCE, SHORT_FORM, Factor, PythonCode, Section, build_code

if TYPE_CHECKING:
    import torch


class KlEstimator(Section):
    """Base class of estimators of KL(current || reference) for each token.

    To define your own estimator, write a class like those below:

        import forgeasync as fa


        class Absolute(fa.KlEstimator):
            '''|log(current / reference)|: no KL, but as cheap and less steep than k2.'''

            def __call__(self, row):
                return row.masked(row.logprobs_T - row.ref_logprobs_T).abs()

    To train with it, set ``kl: {estimator: {kind: python, factory: my_losses.Absolute}, coefficient: 0.01}``.
    A function of ``row``, or a function that returns one, works as well.
    """

    @abstractmethod
    def __call__(self, row: RowTokens) -> torch.Tensor:
        """Return an estimate for each token of a row that has ``ref_logprobs_T``.

        Returns:
            Estimates [T], float32, differentiable in ``row.logprobs_T``; 0 without a gradient where
            ``row.mask_T`` is False.
        """


def _log_ratios(row: RowTokens) -> torch.Tensor:
    """Return log(current / reference) of each token [T]; 0 where masked out."""
    assert row.ref_logprobs_T is not None, "the trainer has a reference wherever there is a penalty"
    return row.masked(row.logprobs_T - row.ref_logprobs_T)


class K1(KlEstimator):
    """log(current / reference): unbiased, and negative for about half of the tokens.

    Source: Schulman, "Approximating KL Divergence", 2020.
    """

    kind: Literal["k1"] = "k1"

    def __call__(self, row: RowTokens) -> torch.Tensor:
        return _log_ratios(row)


class K2(KlEstimator):
    """Half the squared log ratio: biased, with low variance. Its expected gradient is that of the KL.

    Source: Schulman, "Approximating KL Divergence", 2020.
    """

    kind: Literal["k2"] = "k2"

    def __call__(self, row: RowTokens) -> torch.Tensor:
        return _log_ratios(row).square() / 2


class K3(KlEstimator):
    """r - 1 - log r with r = reference / current: unbiased and never negative.

    Source: Schulman, "Approximating KL Divergence", 2020.
    """

    kind: Literal["k3"] = "k3"

    def __call__(self, row: RowTokens) -> torch.Tensor:
        log_ratio_T = capped(-_log_ratios(row))
        return log_ratio_T.expm1() - log_ratio_T


class UnbiasedK3(KlEstimator):
    """k3 weighted by current / behavior. Value and gradient are also unbiased for tokens of another policy.

    Source: DeepSeek-AI, "DeepSeek-V3.2", 2025, section on unbiased KL estimate.
    """

    kind: Literal["unbiased_k3"] = "unbiased_k3"

    def __call__(self, row: RowTokens) -> torch.Tensor:
        return capped(row.log_ratios()).exp() * K3()(row)


class PythonKlEstimator(PythonCode, KlEstimator):
    """Your own estimator, ``(row: RowTokens) -> kl_T``. ``KlEstimator`` has an example.

    A call raises ValueError if your code returns anything else.
    """

    def __call__(self, row: RowTokens) -> torch.Tensor:
        return check_estimates(build_code(self, ("row",))(row), like_T=row.logprobs_T)


AnyKlEstimator = Annotated[
    K1 | K2 | K3 | UnbiasedK3 | PythonKlEstimator, Field(discriminator="kind"), *SHORT_FORM, OWN_INSTANCE
]


class KlPlace(StrEnum):
    """Quantity to which the KL penalty applies."""

    LOSS = "loss"
    """The penalty is added to each token's loss, with its gradient."""
    REWARD = "reward"
    """The penalty is subtracted from each token's reward, so the advantage falls by the penalty to go."""


class KlPenalty(Section):
    """KL penalty towards the run's initial model: coefficient * estimate."""

    estimator: AnyKlEstimator
    """Estimator of the divergence of each token."""
    coefficient: Factor
    """Factor of the penalty."""
    where: KlPlace = KlPlace.LOSS


def penalty_to_go(kl_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor) -> torch.Tensor:
    """Return the sum of each token's own and all later masked values of its sequence, [T], detached.

    A penalty on the reward of each token lowers a token's return by this sum. The tokens of a sequence must
    be contiguous. Source: Hu, "REINFORCE++", 2025, token-level penalty and advantage.
    """
    # In float64, because the results are differences of sums over a whole row.
    masked_T = kl_T.detach().where(mask_T, 0.0).double()
    before_T = masked_T.cumsum(0) - masked_T
    is_first_T = mask_T.new_ones(mask_T.shape)
    is_first_T[1:] = sequence_ids_T[1:] != sequence_ids_T[:-1]
    before_sequence_T = sequence_sums(before_T, is_first_T, sequence_ids_T)
    sums_T = sequence_sums(masked_T, mask_T, sequence_ids_T)
    return (sums_T - (before_T - before_sequence_T)).to(kl_T.dtype)
