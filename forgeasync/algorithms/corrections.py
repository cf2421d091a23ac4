"""Off-policy corrections: weights of each token's loss, for data that another policy sampled.

The importance ratio is current over behavior policy: that of a token, of a sequence (the product over its
trained tokens), or of a sequence per token (their geometric mean). Several corrections multiply
(``product``).

Shape suffix: T trained tokens of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from forgeasync.algorithms.own_results import check_weights
from forgeasync.algorithms.row_tokens import MAX_LOG_RATIO, RowTokens
from forgeasync.schema import OWN_INSTANCE, Factor, PythonCode, Section, build_code

if TYPE_CHECKING:
    import torch

RatioLevel = Literal["token", "sequence", "geometric"]
"""Level of an importance ratio: of a token, of a sequence, or of a sequence per token (geometric mean)."""


def ratios(row: RowTokens, level: RatioLevel) -> torch.Tensor:
    """Return the importance ratio of each token at a level, [T], detached, clamped to [e^-20, e^20]."""
    log_ratio_T = row.log_ratios().detach()
    if level == "sequence":
        log_ratio_T = row.sequence_sums(log_ratio_T)
    elif level == "geometric":
        log_ratio_T = row.sequence_means(log_ratio_T)
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class Correction(Section):
    """Base class of corrections, which give a weight to each token's loss.

    To define your own correction, write a class like those below:

        import forgeasync as fa


        class LinearAge(fa.Correction):
            '''Weights that fall by a constant with every policy version.'''

            per_version: float = 0.1

            def __call__(self, row):
                weights_T = (1.0 - self.per_version * row.ages_T).clamp(min=0.0) * row.mask_T
                return weights_T, {"correction/too_old_share": (row.mask_T & (weights_T == 0)).sum()}

    To train with it, set ``corrections: [{kind: python, factory: my_losses.LinearAge, options: {per_version:
    0.2}}]``. A function of ``row``, or a function that returns one, works as well.
    """

    @property
    def ratio_level(self) -> RatioLevel | None:
        """Level of the importance ratio that the weights bound; None if the weights are not a ratio."""
        return None

    @abstractmethod
    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weights of tokens, and sums for metrics.

        Returns:
            Weights [T], float32, detached, finite, 0 where ``mask_T`` is False; and sums over the trained
            tokens by metric name. A metric is its sum divided by the number of trained tokens.
        """


class TruncatedIs(Correction):
    """min(ratio, cap).

    Source: Ionides, "Truncated Importance Sampling", 2008; for the mismatch of generator and trainer: Yao et
    al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025.
    """

    kind: Literal["truncated_is"] = "truncated_is"
    cap: Factor = 2.0
    """Maximum weight."""
    level: RatioLevel = "token"
    """Ratio of each token, of its sequence, or the geometric mean over its sequence."""

    @property
    def ratio_level(self) -> RatioLevel | None:
        return self.level

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio_T = ratios(row, self.level)
        weights_T = ratio_T.clamp(max=self.cap) * row.mask_T
        return weights_T, {"correction/truncated_share": (row.mask_T & (ratio_T > self.cap)).sum()}


def _between(
    row: RowTokens, level: RatioLevel, low: float, high: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the ratio where low <= ratio <= high, otherwise 0, and the number of tokens set to 0."""
    ratio_T = ratios(row, level)
    is_kept_T = row.mask_T & (ratio_T >= low) & (ratio_T <= high)
    return ratio_T * is_kept_T, {"correction/masked_share": (row.mask_T & ~is_kept_T).sum()}


class MaskedIs(Correction):
    """The ratio where low <= ratio <= high, otherwise 0."""

    kind: Literal["masked_is"] = "masked_is"
    low: float = Field(ge=0.0, le=1e30)
    """Ratios below this have weight 0."""
    high: Factor
    """Must be above ``low``."""
    level: RatioLevel = "token"
    """Ratio of each token, of its sequence, or the geometric mean over its sequence."""

    @property
    def ratio_level(self) -> RatioLevel | None:
        return self.level

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return _between(row, self.level, self.low, self.high)


class IcePop(Correction):
    """A token's ratio where low <= ratio <= high, otherwise 0.

    Source: Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
    (Ring-1T), 2025, IcePop.
    """

    kind: Literal["icepop"] = "icepop"
    low: float = Field(default=0.5, ge=0.0, le=1e30)
    """Ratios below this have weight 0."""
    high: Factor = 5.0
    """Must be above ``low``."""

    @property
    def ratio_level(self) -> RatioLevel | None:
        return "token"

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return _between(row, "token", self.low, self.high)


class OffPolicySequenceMask(Correction):
    """0 for sequences with negative advantage that became less likely by more than a threshold, else 1.

    The threshold applies to the mean over a sequence's tokens of behavior minus current log-probability.
    Source: DeepSeek-AI, "DeepSeek-V3.2", 2025, off-policy sequence masking.
    """

    kind: Literal["off_policy_sequence_mask"] = "off_policy_sequence_mask"
    threshold: Factor
    """Threshold in nats per token."""

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        gap_T = row.sequence_means(row.masked(row.behavior_logprobs_T - row.logprobs_T.detach()))
        is_dropped_T = row.mask_T & (row.advantages_T < 0) & (gap_T > self.threshold)
        weights_T = (row.mask_T & ~is_dropped_T).to(gap_T.dtype)
        return weights_T, {"correction/off_policy_masked_share": is_dropped_T.sum()}


class AgeWeight(Correction):
    """0.5 ** (age / half_life), an exponential discount of tokens by their age in policy versions.

    This is a discount, not an importance weight. Source: the forgetting factor of recursive least squares
    (Haykin, "Adaptive Filter Theory"), here 0.5 ** (1 / half_life) per version.
    """

    kind: Literal["age_weight"] = "age_weight"
    half_life: Factor
    """In policy versions."""

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (-row.ages_T.to(row.logprobs_T.dtype) / self.half_life).exp2() * row.mask_T, {}


class PythonCorrection(PythonCode, Correction):
    """Your own correction, ``(row: RowTokens) -> (weights_T, sums)``. ``Correction`` has an example.

    A call raises ValueError if your code returns anything else.
    """

    def __call__(self, row: RowTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return check_weights(build_code(self, ("row",))(row), like_T=row.logprobs_T)


AnyCorrection = Annotated[
    TruncatedIs | MaskedIs | IcePop | OffPolicySequenceMask | AgeWeight | PythonCorrection,
    Field(discriminator="kind"),
    OWN_INSTANCE,
]


def product(
    corrections: Sequence[Correction], row: RowTokens
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Apply several corrections; return the product of their weights [T], and all of their sums."""
    weights_T = row.mask_T.to(row.logprobs_T.dtype)
    sums: dict[str, torch.Tensor] = {}
    for correction in corrections:
        factor_T, found = correction(row)
        weights_T = weights_T * factor_T
        sums |= found
    return weights_T, sums
