"""Entropies of the distributions that log-probabilities are taken from, exact, in nats, without gradients.

    H = -sum over kept ids of p * log p,    log p = scaled logit - log of the sum of their exponentials

Every function works on scaled logits that exist anyway.

Shape suffixes: U tokens, v this rank's slice of the vocabulary, C tokens with a cut vocabulary, N their kept
ids.
"""

import torch

CPU_BLOCK_BYTES = 2**20
"""Scaled logits that are worked on at once on a CPU: what fits into its caches takes a third of the time."""

SMALLEST_LOG = -1e4
"""Its exponential is 0 in every dtype; of minus infinity 0 * log 0 would be nan."""


@torch.no_grad()
def slice_entropies(scaled_Uv: torch.Tensor, log_sums_U: torch.Tensor) -> torch.Tensor:
    """What a slice of the vocabulary adds to the entropies [U]; ``log_sums_U`` are those of all slices.

    Logits of minus infinity, which are cut away, add nothing.
    """
    entropies_U = torch.empty_like(log_sums_U)
    num_rows = max(1, len(entropies_U))
    if scaled_Uv.device.type == "cpu":
        num_rows = max(1, CPU_BLOCK_BYTES // (scaled_Uv.element_size() * max(1, scaled_Uv.shape[1])))
    blocks = zip(*(part.split(num_rows) for part in (scaled_Uv, log_sums_U, entropies_U)), strict=True)
    for scaled, log_sums, entropies in blocks:
        logs = (scaled - log_sums[:, None]).clamp_(min=SMALLEST_LOG)
        torch.sum(logs.exp().mul_(logs), dim=-1, out=entropies)
    return entropies_U.neg_()


@torch.no_grad()
def kept_entropies(values_N: torch.Tensor, cut_N: torch.Tensor, log_sums_C: torch.Tensor) -> torch.Tensor:
    """The entropies [C] from the scaled logits of all kept ids, each with its token's index."""
    logs_N = values_N - log_sums_C[cut_N]
    return torch.zeros_like(log_sums_C).index_add_(0, cut_N, logs_N.exp().mul_(logs_N)).neg_()
