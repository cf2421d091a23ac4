"""Policy objectives: from log-probabilities and advantages to a loss per token.

Each factory returns a callable over packed tokens, all float32 of shape [T] except the bool mask and the
int64 sequence ids: ``logprobs_T`` (under the current policy, with gradients), ``behavior_logprobs_T``
(under the policy that sampled), ``advantages_T``, ``mask_T`` (True where a response token is trained on),
``sequence_ids_T``. It returns losses [T] (to be masked and aggregated by the caller) and metrics: sums over
the masked tokens, to be divided by their number.

Ratios and their gradients are at most e^20 (``forgeasync.algorithms.log_ratios``).

Shape suffix: T packed tokens.
"""

from typing import Protocol

import torch

from forgeasync.algorithms.log_ratios import capped
from forgeasync.algorithms.sequences import sequence_means, sequence_sums


class Objective(Protocol):
    def __call__(
        self,
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


def ppo_clip(clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None) -> Objective:
    """The clipped surrogate: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    With ``dual_clip`` c the loss of a token of negative advantage is at most c * abs(A). The ratio is current
    over behavior policy. Source: Schulman et al., "Proximal Policy Optimization", 2017, equation 7; separate
    bounds from Yu et al., "DAPO", 2025, equation 8; dual clip from Ye et al., "Mastering Complex Control in
    MOBA Games", 2020, equation 5.

    Raises:
        ValueError: ``dual_clip`` is not above 1.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"ppo_clip: dual_clip = {dual_clip}; must be above 1")

    def objective(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio_T = capped(_log_ratios(logprobs_T, behavior_logprobs_T, mask_T)).exp()
        losses_T, is_clipped_T = _clipped_surrogate(ratio_T, advantages_T, mask_T, clip_low, clip_high)
        sums = {"objective/clipped_share": is_clipped_T.sum()}
        if dual_clip is not None:
            bound_T = -dual_clip * advantages_T
            is_bounded_T = mask_T & (advantages_T < 0) & (losses_T > bound_T)
            losses_T = torch.where(is_bounded_T, bound_T, losses_T)
            sums["objective/dual_clipped_share"] = is_bounded_T.sum()
        return losses_T, sums

    return objective


def _log_ratios(
    logprobs_T: torch.Tensor, behavior_logprobs_T: torch.Tensor, mask_T: torch.Tensor
) -> torch.Tensor:
    # Unmasked tokens have no behavior logprob: their ratio must not become inf or nan.
    return torch.where(mask_T, logprobs_T - behavior_logprobs_T, 0.0)


def _clipped_surrogate(
    ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    mask_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(ratio * A, clip(ratio) * A), and which masked tokens the clip holds back; both [T]."""
    plain_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    return -torch.minimum(plain_T, clipped_T), mask_T & (clipped_T < plain_T)


def cispo(clip_low: float, clip_high: float) -> Objective:
    """-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob: clipped weights, every token's gradient.

    Source: MiniMax, "MiniMax-M1", 2025, equations 4 and 5; sg stops the gradient.
    """

    def objective(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio_T = capped(_log_ratios(logprobs_T, behavior_logprobs_T, mask_T).detach()).exp()
        clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
        is_clipped_T = mask_T & (clipped_T != ratio_T)
        return -clipped_T * advantages_T * logprobs_T, {"objective/clipped_share": is_clipped_T.sum()}

    return objective


def gspo(clip_low: float = 3e-4, clip_high: float = 4e-4) -> Objective:
    """The clipped surrogate over a sequence's ratio per token: exp(mean of its tokens' log ratios).

    Every token of a sequence has the sequence's loss: to be aggregated by ``sequence_mean_of_token_mean``.
    Source: Zheng et al., "Group Sequence Policy Optimization", 2025, equations 5 and 7.
    """

    def objective(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_ratio_T = _log_ratios(logprobs_T, behavior_logprobs_T, mask_T)
        ratio_T = capped(sequence_means(log_ratio_T, mask_T, sequence_ids_T)).exp()
        losses_T, is_clipped_T = _clipped_surrogate(ratio_T, advantages_T, mask_T, clip_low, clip_high)
        return losses_T, {"objective/clipped_share": is_clipped_T.sum()}

    return objective


def reinforce() -> Objective:
    """-A * logprob. Source: Williams, "Simple Statistical Gradient-Following Algorithms", 1992."""

    def objective(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -advantages_T * logprobs_T, {}

    return objective


def topr() -> Objective:
    """Tapered off-policy REINFORCE: sequences of negative advantage weigh min(ratio, 1), the others 1.

    The ratio is the sequence's (product over its tokens), without gradient. Source: Le Roux et al., "Tapered
    Off-Policy REINFORCE", 2025, equation 7.
    """

    def objective(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_ratio_T = _log_ratios(logprobs_T, behavior_logprobs_T, mask_T).detach()
        ratio_T = sequence_sums(log_ratio_T, mask_T, sequence_ids_T).clamp(max=0.0).exp()
        weights_T = torch.where(advantages_T < 0, ratio_T, 1.0)
        is_tapered_T = mask_T & (weights_T < 1.0)
        return -weights_T * advantages_T * logprobs_T, {"objective/tapered_share": is_tapered_T.sum()}

    return objective


def kimi15(tau: float) -> Objective:
    """-A * logprob + tau / 2 * (log ratio)^2 of whole sequences: the square holds the policy near behavior.

    A token's part of the square is its own log ratio times its sequence's, so that a sequence's parts add up.
    Source: Kimi Team, "Kimi k1.5", 2025, section 2.3.2, the gradient of the surrogate loss.
    """

    def objective(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_ratio_T = _log_ratios(logprobs_T, behavior_logprobs_T, mask_T)
        square_T = log_ratio_T * sequence_sums(log_ratio_T, mask_T, sequence_ids_T)
        return -advantages_T * logprobs_T + tau / 2 * square_T, {}

    return objective


class DecoupledObjective(Protocol):
    """An objective that also knows the policy at the start of the step."""

    def __call__(
        self,
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        proximal_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


def decoupled_ppo(clip: float = 0.2, behavior_cap: float = 5.0) -> DecoupledObjective:
    """PPO clipped around a proximal policy, weighted by proximal / behavior; tokens above the cap weigh 0.

    Source: Fu et al., "AReaL", 2025, equation 5; the cap as in its implementation.
    """

    def objective(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        proximal_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        proximal_T = proximal_logprobs_T.detach()
        weights_T = capped(_log_ratios(proximal_T, behavior_logprobs_T, mask_T)).exp()
        is_capped_T = mask_T & (weights_T > behavior_cap)
        ratio_T = capped(_log_ratios(logprobs_T, proximal_T, mask_T)).exp()
        losses_T, is_clipped_T = _clipped_surrogate(ratio_T, advantages_T, mask_T, clip, clip)
        return torch.where(is_capped_T, 0.0, weights_T) * losses_T, {
            "objective/clipped_share": is_clipped_T.sum(),
            "objective/behavior_capped_share": is_capped_T.sum(),
        }

    return objective


def supervised() -> Objective:
    """Negative log-likelihood of the given tokens; advantages and behavior are ignored."""

    def objective(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -logprobs_T, {}

    return objective
