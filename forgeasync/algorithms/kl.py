"""The KL penalty towards the model that a run starts from, and its estimators.

They estimate KL(current || reference) from sampled tokens, in nats per token: unbiased if tokens are drawn
from the current policy, and with ``unbiased_k3`` also if they are not. Source of the names: Schulman,
"Approximating KL Divergence", 2020. Ratios are at most e^20, in values and gradients.

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
    """An estimate of KL(current || reference) for every token.

    An estimator of your own is a class like those below:

        import forgeasync as fa


        class Absolute(fa.KlEstimator):
            '''|log(current / reference)|: no KL, but as cheap and less steep than k2.'''

            def __call__(self, row):
                return row.masked(row.logprobs_T - row.ref_logprobs_T).abs()

    With ``kl: {estimator: {kind: python, factory: my_losses.Absolute}, coefficient: 0.01}`` a run trains with
    it. A function of ``row``, or a function that returns one, works as well.
    """

    @abstractmethod
    def __call__(self, row: RowTokens) -> torch.Tensor:
        """Estimate the KL for every token: float32 [T], with gradients by ``row.logprobs_T``; 0, without a
        gradient, where masked out. ``row.ref_logprobs_T`` is given."""


def _log_ratios(row: RowTokens) -> torch.Tensor:
    """log(current / reference) [T]."""
    assert row.ref_logprobs_T is not None, "the trainer has a reference wherever there is a penalty"
    return row.masked(row.logprobs_T - row.ref_logprobs_T)


class K1(KlEstimator):
    """log(current / reference): unbiased, and negative for half of the tokens."""

    kind: Literal["k1"] = "k1"

    def __call__(self, row: RowTokens) -> torch.Tensor:
        return _log_ratios(row)


class K2(KlEstimator):
    """Half the squared log ratio: biased, with low variance; its expected gradient is that of the KL."""

    kind: Literal["k2"] = "k2"

    def __call__(self, row: RowTokens) -> torch.Tensor:
        return _log_ratios(row).square() / 2


class K3(KlEstimator):
    """r - 1 - log r with r = reference / current: unbiased and never negative."""

    kind: Literal["k3"] = "k3"

    def __call__(self, row: RowTokens) -> torch.Tensor:
        log_ratio_T = capped(-_log_ratios(row))
        return log_ratio_T.expm1() - log_ratio_T


class UnbiasedK3(KlEstimator):
    """k3 weighted by current / behavior: value and gradient are unbiased for tokens of another policy too.

    Source: DeepSeek-AI, "DeepSeek-V3.2", 2025, section on unbiased KL estimate.
    """

    kind: Literal["unbiased_k3"] = "unbiased_k3"

    def __call__(self, row: RowTokens) -> torch.Tensor:
        return capped(row.log_ratios()).exp() * K3()(row)


class PythonKlEstimator(PythonCode, KlEstimator):
    """Your own estimator: ``(row: RowTokens) -> kl_T``; ``KlEstimator`` has an example.

    Raises ValueError if it returns anything else; says what it returned.
    """

    def __call__(self, row: RowTokens) -> torch.Tensor:
        return check_estimates(build_code(self, ("row",))(row), like_T=row.logprobs_T)


AnyKlEstimator = Annotated[
    K1 | K2 | K3 | UnbiasedK3 | PythonKlEstimator, Field(discriminator="kind"), *SHORT_FORM, OWN_INSTANCE
]


class KlPlace(StrEnum):
    LOSS = "loss"
    """Added to every token's loss, with its gradient."""
    REWARD = "reward"
    """Subtracted from the reward of every token: its advantage falls by the sum from this token on."""


class KlPenalty(Section):
    """The KL penalty towards the model that the run starts from: coefficient * estimate."""

    estimator: AnyKlEstimator
    coefficient: Factor
    where: KlPlace = KlPlace.LOSS


def penalty_to_go(kl_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor) -> torch.Tensor:
    """Sum, for every token [T], its own and all later masked values of its sequence; detached.

    A penalty on the reward of every token lowers a token's return by this. The tokens of a sequence must be
    contiguous. Source: Hu, "REINFORCE++", 2025, its token-level penalty and advantage.
    """
    # In float64: differences of sums over a whole row.
    masked_T = kl_T.detach().where(mask_T, 0.0).double()
    before_T = masked_T.cumsum(0) - masked_T
    is_first_T = mask_T.new_ones(mask_T.shape)
    is_first_T[1:] = sequence_ids_T[1:] != sequence_ids_T[:-1]
    before_sequence_T = sequence_sums(before_T, is_first_T, sequence_ids_T)
    sums_T = sequence_sums(masked_T, mask_T, sequence_ids_T)
    return (sums_T - (before_T - before_sequence_T)).to(kl_T.dtype)
