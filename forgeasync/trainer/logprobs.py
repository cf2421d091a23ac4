"""Log-probabilities of given tokens under the distribution the sampler drew from.

Shape suffixes: T tokens, V vocabulary.
"""

import torch


def token_logprobs(
    logits_TV: torch.Tensor, token_ids_T: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """log softmax(logits / temperature) at the given tokens, in float32 [T]; differentiable in logits."""
    scaled_TV = logits_TV.float() / temperature
    chosen_T = scaled_TV.gather(-1, token_ids_T[:, None]).squeeze(-1)
    return chosen_T - scaled_TV.logsumexp(dim=-1)
