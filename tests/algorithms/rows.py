"""Random rows of tokens, and what float64 references are computed from."""

from typing import NamedTuple

import numpy as np
import torch

from forgeasync.algorithms import RowTokens


def random_row(seed: int, *, is_weighted: bool = False) -> RowTokens:
    """Packed sequences of uneven lengths, some tokens masked out (and nan there), one sequence wholly."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=6)
    order = rng.permutation(len(lengths))
    ids = np.repeat(order * 7, lengths)
    num = len(ids)
    mask = rng.random(num) < 0.8
    mask[ids == 0] = False
    mask[ids == 7] = True
    logprobs, shift = rng.uniform(-4, -0.1, num), rng.normal(0, 0.4, num)
    unknown = np.where(mask, 0.0, np.nan)
    weights = rng.uniform(1.0, 7.0, 6) if is_weighted else np.ones(6)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).float()

    return RowTokens(
        logprobs_T=tensor(logprobs).requires_grad_(),
        behavior_logprobs_T=tensor(logprobs - shift + unknown),
        proximal_logprobs_T=tensor(logprobs - 0.5 * shift),
        ref_logprobs_T=tensor(logprobs - rng.normal(0, 0.4, num) + unknown),
        advantages_T=tensor(np.repeat(rng.normal(0, 1, 6), lengths)),
        ages_T=torch.from_numpy(rng.integers(0, 5, num)),
        mask_T=torch.from_numpy(mask),
        sequence_ids_T=torch.from_numpy(ids),
        sample_weights_T=tensor(np.repeat(weights, lengths)),
    )


class Exact(NamedTuple):
    """The trained tokens of a row in float64."""

    x: torch.Tensor
    """Log-probabilities; formulas that stop the gradient detach them."""
    behavior: torch.Tensor
    proximal: torch.Tensor
    ref: torch.Tensor
    a: torch.Tensor
    ages: torch.Tensor
    weights: torch.Tensor
    own: torch.Tensor
    """[T, T]: 1 where two tokens are of one sequence."""

    def ratios(self) -> torch.Tensor:
        return (self.x - self.behavior).exp()

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """Of each token's sequence."""
        return self.own @ values / self.own.sum(1)


def exact(row: RowTokens) -> Exact:
    mask_T = row.mask_T

    def trained(values_T: torch.Tensor) -> torch.Tensor:
        return values_T.detach()[mask_T].double()

    ids_T = row.sequence_ids_T[mask_T]
    return Exact(
        x=trained(row.logprobs_T).requires_grad_(),
        behavior=trained(row.behavior_logprobs_T),
        proximal=trained(row.proximal_logprobs_T),
        ref=trained(row.ref_logprobs_T),
        a=trained(row.advantages_T),
        ages=trained(row.ages_T),
        weights=trained(row.sample_weights_T),
        own=(ids_T[:, None] == ids_T).double(),
    )
