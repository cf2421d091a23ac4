"""Off-policy corrections: a weight for every token's loss, for data that another policy sampled.

Each factory returns a callable over the keywords of ``forgeasync.algorithms.objectives`` and ``ages_T`` (int,
policy versions between sampling and training; None where nothing needs them); it returns weights [T]
(float32, detached, 0 where masked out) and metrics: sums over the masked tokens, to be divided by their
number. The ratio is current over behavior policy, of a token, of a sequence (product over its masked tokens)
or of a sequence per token (geometric mean). Corrections combine by ``product``.

Shape suffix: T packed tokens.
"""

from enum import StrEnum
from typing import Protocol

import torch

from forgeasync.algorithms.log_ratios import MAX_LOG_RATIO
from forgeasync.algorithms.sequences import sequence_means, sequence_sums


class Level(StrEnum):
    """What a ratio is taken of."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


Weights = tuple[torch.Tensor, dict[str, torch.Tensor]]


class Correction(Protocol):
    def __call__(
        self,
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
        ages_T: torch.Tensor | None = None,
    ) -> Weights: ...


def ratios(
    logprobs_T: torch.Tensor,
    behavior_logprobs_T: torch.Tensor,
    mask_T: torch.Tensor,
    sequence_ids_T: torch.Tensor,
    level: Level,
) -> torch.Tensor:
    """Current over behavior policy at a level, for every token [T]; detached."""
    log_ratio_T = torch.where(mask_T, logprobs_T.detach() - behavior_logprobs_T, 0.0)
    match Level(level):
        case Level.SEQUENCE:
            log_ratio_T = sequence_sums(log_ratio_T, mask_T, sequence_ids_T)
        case Level.GEOMETRIC:
            log_ratio_T = sequence_means(log_ratio_T, mask_T, sequence_ids_T)
        case Level.TOKEN:
            pass
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_is(cap: float, level: Level | str = Level.TOKEN) -> Correction:
    """min(ratio, cap).

    Source: Ionides, "Truncated Importance Sampling", 2008; for the mismatch of sampler and trainer: Yao et
    al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025.

    Raises:
        ValueError: the cap is not positive, or there is no such level.
    """
    level = Level(level)
    if cap <= 0:
        raise ValueError(f"truncated_is: cap = {cap}; must be positive")

    def correction(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
        ages_T: torch.Tensor | None = None,
    ) -> Weights:
        ratio_T = ratios(logprobs_T, behavior_logprobs_T, mask_T, sequence_ids_T, level)
        weights_T = ratio_T.clamp(max=cap) * mask_T
        return weights_T, {"correction/truncated_share": (mask_T & (ratio_T > cap)).sum()}

    return correction


def masked_is(low: float, high: float, level: Level | str = Level.TOKEN) -> Correction:
    """The ratio where low <= ratio <= high, otherwise 0.

    Raises:
        ValueError: the bounds are not 0 <= low < high, or there is no such level.
    """
    level = Level(level)
    if not 0 <= low < high:
        raise ValueError(f"masked_is: low = {low}, high = {high}; must be 0 <= low < high")

    def correction(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
        ages_T: torch.Tensor | None = None,
    ) -> Weights:
        ratio_T = ratios(logprobs_T, behavior_logprobs_T, mask_T, sequence_ids_T, level)
        is_kept_T = mask_T & (ratio_T >= low) & (ratio_T <= high)
        return ratio_T * is_kept_T, {"correction/masked_share": (mask_T & ~is_kept_T).sum()}

    return correction


def icepop(low: float, high: float) -> Correction:
    """``masked_is`` of tokens.

    Source: Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
    (Ring-1T), 2025, IcePop.
    """
    return masked_is(low, high, Level.TOKEN)


def off_policy_sequence_mask(threshold: float) -> Correction:
    """0 for sequences of negative advantage that have become less likely by more than a threshold, else 1.

    Compared is the mean over a sequence's tokens of behavior minus current log-probability. Source:
    DeepSeek-AI, "DeepSeek-V3.2", 2025, off-policy sequence masking.
    """

    def correction(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
        ages_T: torch.Tensor | None = None,
    ) -> Weights:
        gap_T = torch.where(mask_T, behavior_logprobs_T - logprobs_T.detach(), 0.0)
        gap_T = sequence_means(gap_T, mask_T, sequence_ids_T)
        is_dropped_T = mask_T & (advantages_T < 0) & (gap_T > threshold)
        weights_T = (mask_T & ~is_dropped_T).to(gap_T.dtype)
        return weights_T, {"correction/off_policy_masked_share": is_dropped_T.sum()}

    return correction


def age_weight(half_life: float) -> Correction:
    """0.5 ** (age / half_life): an exponential discount of tokens by their age in policy versions.

    A discount, not an importance weight. Source: the forgetting factor of recursive least squares (Haykin,
    "Adaptive Filter Theory"), here 0.5 ** (1 / half_life) a version.

    Raises:
        ValueError: the half-life is not positive.
    """
    if half_life <= 0:
        raise ValueError(f"age_weight: half_life = {half_life}; must be positive")

    def correction(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
        ages_T: torch.Tensor | None = None,
    ) -> Weights:
        assert ages_T is not None, "weights by age need ages"
        return torch.exp2(-ages_T.to(logprobs_T.dtype) / half_life) * mask_T, {}

    return correction


def product(*corrections: Correction) -> Correction:
    """All of them at once: weights multiply, metrics are put together."""

    def correction(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
        ages_T: torch.Tensor | None = None,
    ) -> Weights:
        weights_T = mask_T.to(logprobs_T.dtype)
        metrics: dict[str, torch.Tensor] = {}
        for one in corrections:
            factor_T, found = one(
                logprobs_T=logprobs_T,
                behavior_logprobs_T=behavior_logprobs_T,
                advantages_T=advantages_T,
                mask_T=mask_T,
                sequence_ids_T=sequence_ids_T,
                ages_T=ages_T,
            )
            weights_T = weights_T * factor_T
            metrics |= found
        return weights_T, metrics

    return correction
