"""Estimators of KL(current || reference) from sampled tokens, in nats per token.

Unbiased where tokens are drawn from the current policy; ``unbiased_k3`` also where they are not. Source of
the names: Schulman, "Approximating KL Divergence", 2020.

Ratios are at most e^20, in values and gradients (``forgeasync.algorithms.log_ratios``).

Shape suffix: T packed tokens, float32. Gradients flow through ``logprobs_T``.
"""

import torch

from forgeasync.algorithms.log_ratios import capped
from forgeasync.algorithms.sequences import sequence_sums


def k1(logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor) -> torch.Tensor:
    """log(current / reference): unbiased, and negative for half of the tokens."""
    return logprobs_T - ref_logprobs_T


def k2(logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor) -> torch.Tensor:
    """Half the squared log ratio: biased, of low variance; its gradient is that of the KL in expectation."""
    return (logprobs_T - ref_logprobs_T).square() / 2


def k3(logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r with r = reference / current: unbiased and never negative."""
    log_ratio_T = capped(ref_logprobs_T - logprobs_T)
    return log_ratio_T.expm1() - log_ratio_T


def unbiased_k3(
    logprobs_T: torch.Tensor, behavior_logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor
) -> torch.Tensor:
    """k3 weighted by current / behavior: unbiased for tokens that another policy sampled, gradient too.

    Source: DeepSeek-AI, "DeepSeek-V3.2", 2025, section on unbiased KL estimate.
    """
    ratio_T = capped(logprobs_T - behavior_logprobs_T).exp()
    return ratio_T * k3(logprobs_T, ref_logprobs_T)


def penalty_to_go(kl_T: torch.Tensor, mask_T: torch.Tensor, sequence_ids_T: torch.Tensor) -> torch.Tensor:
    """For every token [T] the sum of its own and all later masked values of its sequence; detached.

    A penalty on the reward of every token lowers a token's return by this. The tokens of a sequence lie side
    by side. Source: Hu, "REINFORCE++", 2025, its token-level penalty and advantage.
    """
    # In float64: differences of sums over a whole row.
    masked_T = torch.where(mask_T, kl_T.detach(), 0.0).double()
    before_T = masked_T.cumsum(0) - masked_T
    is_first_T = torch.ones_like(mask_T)
    is_first_T[1:] = sequence_ids_T[1:] != sequence_ids_T[:-1]
    before_sequence_T = sequence_sums(before_T, is_first_T, sequence_ids_T)
    sums_T = sequence_sums(masked_T, mask_T, sequence_ids_T)
    return (sums_T - (before_T - before_sequence_T)).to(kl_T.dtype)
