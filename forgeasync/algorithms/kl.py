"""Estimators of KL(current || reference) from sampled tokens, in nats per token.

Unbiased where tokens are drawn from the current policy; ``unbiased_k3`` also where they are not. Source of
the names: Schulman, "Approximating KL Divergence", 2020.

Shape suffix: T packed tokens, float32. Gradients flow through ``logprobs_T``.
"""

import torch


def k1(logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor) -> torch.Tensor:
    """log(current / reference): unbiased, and negative for half of the tokens."""
    return logprobs_T - ref_logprobs_T


def k2(logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor) -> torch.Tensor:
    """Half the squared log ratio: biased, of low variance; its gradient is that of the KL in expectation."""
    return (logprobs_T - ref_logprobs_T).square() / 2


def k3(logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r with r = reference / current: unbiased and never negative."""
    log_ratio_T = ref_logprobs_T - logprobs_T
    return log_ratio_T.expm1() - log_ratio_T


def unbiased_k3(
    logprobs_T: torch.Tensor, behavior_logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor
) -> torch.Tensor:
    """k3 weighted by current / behavior: unbiased for tokens that another policy sampled, gradient too.

    Source: DeepSeek-AI, "DeepSeek-V3.2", 2025, section on unbiased KL estimate.
    """
    ratio_T = (logprobs_T - behavior_logprobs_T).exp()
    return ratio_T * k3(logprobs_T, ref_logprobs_T)
