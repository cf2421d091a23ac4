"""Random kept sets, and their log-probabilities by definition."""

import numpy as np
import torch


def make_case(
    seed: int, num_tokens: int, vocab_size: int, *, largest_set: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Wide random logits [T, V] in float64, tokens, and kept sets with the token in them; some are empty."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_tokens, vocab_size)) * 5
    tokens = rng.integers(0, vocab_size, num_tokens)
    offsets, ids = [0], []
    for token in tokens:
        width = int(rng.integers(0, min(largest_set, vocab_size) + 1))
        others = rng.permutation(np.delete(np.arange(vocab_size), token))[: max(0, width - 1)]
        ids += sorted([token, *others]) if width else []
        offsets.append(len(ids))
    return (
        torch.from_numpy(logits),
        torch.from_numpy(tokens),
        torch.tensor(offsets),
        torch.tensor(ids, dtype=torch.int32),
    )


def reference(
    logits: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor, temperature: float
) -> torch.Tensor:
    """One token at a time, in float64: the kept logits' log-softmax at the token."""
    logprobs = []
    for index, token in enumerate(tokens.tolist()):
        kept = ids[offsets[index] : offsets[index + 1]].tolist() or list(range(logits.shape[1]))
        scaled = logits[index, kept].double() / temperature
        logprobs.append(torch.log_softmax(scaled, 0)[kept.index(token)])
    return torch.stack(logprobs)


ALWAYS_GATHER, NEVER_GATHER = 0, 10**9
"""Costs of reading a logit that leave no choice."""
