"""Policy objectives: from log-probabilities and advantages to a loss per token.

Each factory returns a callable over packed tokens, all float32 of shape [T] except the bool mask and the
int64 sequence ids: ``logprobs_T`` (under the current policy, with gradients), ``behavior_logprobs_T``
(under the policy that sampled), ``advantages_T``, ``mask_T`` (True where a response token is trained on),
``sequence_ids_T``. It returns losses [T] (to be masked and aggregated by the caller) and metrics: sums over
the masked tokens, to be divided by their number.

Shape suffix: T packed tokens.
"""

from typing import Protocol

import torch


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


def ppo_clip(clip_low: float = 0.2, clip_high: float = 0.28) -> Objective:
    """The clipped surrogate: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    Source: Schulman et al., "Proximal Policy Optimization", 2017, equation 7; separate bounds from Yu et
    al., "DAPO", 2025, equation 8. The ratio is current over behavior policy.
    """

    def objective(
        *,
        logprobs_T: torch.Tensor,
        behavior_logprobs_T: torch.Tensor,
        advantages_T: torch.Tensor,
        mask_T: torch.Tensor,
        sequence_ids_T: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # Unmasked tokens have no behavior logprob: their ratio must not become inf or nan.
        log_ratio_T = torch.where(mask_T, logprobs_T - behavior_logprobs_T, 0.0)
        ratio_T = log_ratio_T.exp()
        clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
        losses_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
        is_clipped_T = mask_T & (clipped_T * advantages_T < ratio_T * advantages_T)
        return losses_T, {"objective/clipped_share": is_clipped_T.sum()}

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
