"""Rows of tokens for formulas: what a test does not care about has harmless values."""

import torch

from forgeasync.algorithms import Loss, RowTokens


def make_tokens(logprobs_T: torch.Tensor, **fields: torch.Tensor | None) -> RowTokens:
    """One sequence, on policy, of advantage 1, unless ``fields`` say otherwise."""
    num = len(logprobs_T)
    harmless = {
        "behavior_logprobs_T": logprobs_T.detach(),
        "advantages_T": torch.ones(num),
        "mask_T": torch.ones(num, dtype=torch.bool),
        "sequence_ids_T": torch.zeros(num, dtype=torch.long),
        "ages_T": torch.zeros(num, dtype=torch.int32),
    }
    return RowTokens(logprobs_T=logprobs_T, **(harmless | fields))


K3 = {"estimator": "k3", "coefficient": 0.3, "where": "loss"}


def section(**keys: object) -> Loss:
    return Loss.model_validate(keys)
