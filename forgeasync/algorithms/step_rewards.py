"""Computes advantages of tokens from rewards of steps (process supervision).

Shape suffixes: G rollouts of one group, J steps of one response, T tokens of one response.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forgeasync.algorithms.advantages import normalized

if TYPE_CHECKING:
    import torch


def from_step_rewards(
    step_rewards_G: Sequence[torch.Tensor],
    step_ends_G: Sequence[torch.Tensor],
    lengths_G: Sequence[int],
) -> list[torch.Tensor]:
    """Compute advantages of tokens from rewards of steps: float32 [T] for each rollout of a group.

    ``step_rewards_G[i]`` [J] has the rewards of the steps of rollout i, and ``step_ends_G[i]`` [J] the token
    positions where they end in its response of ``lengths_G[i]`` tokens, exclusive and increasing. Rewards are
    normalized by mean and unbiased standard deviation (plus 1e-6) over all steps of the group; a token's
    advantage is the sum over the steps that end at it or after it. Tokens after the last step have 0. If all
    steps have the same reward, all tokens have exactly 0.

    Source: Shao et al., "DeepSeekMath", 2024, section 4.1.3.

    Raises:
        ValueError: the arguments differ in length, or the ends do not fit the rewards or the response.
    """
    if not len(step_rewards_G) == len(step_ends_G) == len(lengths_G):
        raise ValueError(
            f"from_step_rewards: {len(step_rewards_G)} step_rewards, {len(step_ends_G)} step_ends and "
            f"{len(lengths_G)} lengths; must be one of each for every rollout"
        )
    for index, (rewards_J, ends_J, length) in enumerate(
        zip(step_rewards_G, step_ends_G, lengths_G, strict=True)
    ):
        _check_steps(index, rewards_J, ends_J, length)
    return [
        _spread(sums_J, ends_J, length).float()
        for sums_J, ends_J, length in zip(
            sums_of_later_steps(step_rewards_G), step_ends_G, lengths_G, strict=True
        )
    ]


def sums_of_later_steps(step_rewards_G: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sum, for every step of each rollout [J], its own and all later normalized rewards; float64.

    Rewards are normalized over all steps of the group; the source is that of ``from_step_rewards``.
    """
    import torch

    if sum(rewards_J.numel() for rewards_J in step_rewards_G) == 0:
        return [rewards_J.double() for rewards_J in step_rewards_G]
    # In float64: differences of sums over the whole response.
    whole_N = torch.cat([rewards_J.double() for rewards_J in step_rewards_G])
    split = normalized(whole_N).split([rewards_J.numel() for rewards_J in step_rewards_G])
    return [values_J.flip(0).cumsum(0).flip(0) for values_J in split]


def _check_steps(index: int, rewards_J: torch.Tensor, ends_J: torch.Tensor, length: int) -> None:
    where = f"from_step_rewards: rollout {index}"
    if rewards_J.ndim != 1 or rewards_J.shape != ends_J.shape:
        raise ValueError(
            f"{where} has step_rewards of shape {tuple(rewards_J.shape)} and step_ends of shape "
            f"{tuple(ends_J.shape)}; must be one reward and one end for every step"
        )
    if not bool(rewards_J.isfinite().all()):
        raise ValueError(f"{where} has step_rewards {rewards_J.tolist()}; must be finite")
    ends = [0, *ends_J.tolist()]
    if any(end <= before for before, end in itertools.pairwise(ends)):
        raise ValueError(f"{where} has step_ends {ends[1:]}; must increase and begin at 1 or later")
    if ends[-1] > length:
        raise ValueError(f"{where} has a step that ends at {ends[-1]}; must be within its {length} tokens")


def _spread(sums_J: torch.Tensor, ends_J: torch.Tensor, length: int) -> torch.Tensor:
    """Give every token [T] the value of the first step that ends after its position."""
    advantages_T = sums_J.new_zeros(length)
    for total, (start, end) in zip(sums_J, itertools.pairwise([0, *ends_J.tolist()]), strict=True):
        advantages_T[start:end] = total
    return advantages_T
