"""Rows of tokens for formulas: what a test does not care about has harmless values."""

import torch

from forgeasync.algorithms import Loss, RowTokens


def make_tokens(
    logprobs_T: torch.Tensor,
    *,
    behavior_logprobs_T: torch.Tensor | None = None,
    advantages_T: torch.Tensor | None = None,
    mask_T: torch.Tensor | None = None,
    sequence_ids_T: torch.Tensor | None = None,
    ages_T: torch.Tensor | None = None,
    ref_logprobs_T: torch.Tensor | None = None,
    proximal_logprobs_T: torch.Tensor | None = None,
) -> RowTokens:
    """One sequence, on policy, of advantage 1, unless said otherwise."""
    num = len(logprobs_T)
    return RowTokens(
        logprobs_T=logprobs_T,
        behavior_logprobs_T=logprobs_T.detach() if behavior_logprobs_T is None else behavior_logprobs_T,
        advantages_T=torch.ones(num) if advantages_T is None else advantages_T,
        mask_T=torch.ones(num, dtype=torch.bool) if mask_T is None else mask_T,
        sequence_ids_T=torch.zeros(num, dtype=torch.long) if sequence_ids_T is None else sequence_ids_T,
        ages_T=torch.zeros(num, dtype=torch.int32) if ages_T is None else ages_T,
        ref_logprobs_T=ref_logprobs_T,
        proximal_logprobs_T=proximal_logprobs_T,
    )


K3 = {"estimator": "k3", "coefficient": 0.3, "where": "loss"}


def section(**keys: object) -> Loss:
    return Loss.model_validate(keys)
