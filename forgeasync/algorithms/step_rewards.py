"""Advantages of tokens from rewards of steps (process supervision).

Shape suffixes: G rollouts of one group, J steps of one response, T tokens of one response.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from forgeasync.algorithms.advantages import normalized

if TYPE_CHECKING:
    import torch


class StepCredit(StrEnum):
    """Method that turns the rewards of a response's steps into the advantages of its tokens."""

    SUM_TO_GO = "sum_to_go"
    """Sum of the step's own and all later rewards, normalized over all steps of the group.

    Source: Shao et al., "DeepSeekMath", 2024, section 4.1.3.
    """
    MINIMUM = "minimum"
    """Minimum of the step's own and all later rewards, normalized over all steps of the group.

    A step has the value of the worst step from it on, which further steps cannot raise. Source: Cheng et al.,
    "Stop Summation: Min-Form Credit Assignment Is All Process Reward Model Needs for Reasoning", 2025,
    equation 2.
    """
    PER_STEP = "per_step"
    """Sum of the step's own and all later rewards, normalized over the group's steps with the same index.

    A step without a counterpart in another response has 0. Source for comparing steps at the same position:
    Feng et al., "Group-in-Group Policy Optimization", 2025, section 4.3.
    """


def step_advantages(step_rewards_G: Sequence[torch.Tensor], credit: StepCredit) -> list[torch.Tensor]:
    """Return the advantages of the steps of each rollout of a group, float64 [J].

    All are exactly 0 if all compared rewards are equal.
    """
    match credit:
        case StepCredit.SUM_TO_GO:
            return sums_of_later_steps(step_rewards_G)
        case StepCredit.MINIMUM:
            return [
                values_J.flip(0).cummin(0).values.flip(0) if values_J.numel() else values_J
                for values_J in _normalized_together(step_rewards_G)
            ]
        case StepCredit.PER_STEP:
            return _normalized_by_place([_sums_to_go(rewards_J.double()) for rewards_J in step_rewards_G])


def from_step_rewards(
    step_rewards_G: Sequence[torch.Tensor],
    step_ends_G: Sequence[torch.Tensor],
    lengths_G: Sequence[int],
) -> list[torch.Tensor]:
    """Return the advantages of the tokens of each rollout of a group, float32 [T], from rewards of steps.

    Rewards are normalized by mean and unbiased standard deviation (plus 1e-6) over all steps of the group. A
    token's advantage is the sum over its own step and all later steps. Tokens after the last step have 0. If
    all steps have the same reward, all tokens have exactly 0.

    Source: Shao et al., "DeepSeekMath", 2024, section 4.1.3.

    Args:
        step_rewards_G: Rewards of each rollout's steps, each [J].
        step_ends_G: Token positions in the response at which the steps end, each [J], exclusive, increasing.
        lengths_G: Number of response tokens of each rollout.

    Raises:
        ValueError: The arguments differ in length, or the ends do not fit the rewards or the response.
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
    """Return the sum of each step's own and all later normalized rewards, float64 [J] for each rollout.

    Rewards are normalized over all steps of the group. See ``from_step_rewards`` for the source.
    """
    return [_sums_to_go(values_J) for values_J in _normalized_together(step_rewards_G)]


def _normalized_together(step_rewards_G: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the rewards normalized over all steps of the group, float64."""
    import torch

    if sum(rewards_J.numel() for rewards_J in step_rewards_G) == 0:
        return [rewards_J.double() for rewards_J in step_rewards_G]
    # In float64, because advantages are sums of many normalized rewards.
    whole_N = torch.cat([rewards_J.double() for rewards_J in step_rewards_G])
    return list(normalized(whole_N).split([rewards_J.numel() for rewards_J in step_rewards_G]))


def _normalized_by_place(values_G: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the values normalized over all rollouts that have a step of the same index."""
    import torch

    found = [values_J.clone() for values_J in values_G]
    for place in range(max((values_J.numel() for values_J in values_G), default=0)):
        having = [index for index, values_J in enumerate(values_G) if values_J.numel() > place]
        compared_N = normalized(torch.stack([values_G[index][place] for index in having]))
        for index, value in zip(having, compared_N, strict=True):
            found[index][place] = value
    return found


def _sums_to_go(values_J: torch.Tensor) -> torch.Tensor:
    return values_J.flip(0).cumsum(0).flip(0)


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
    """Return, for each token [T], the value of the first step that ends after its position, otherwise 0."""
    advantages_T = sums_J.new_zeros(length)
    for total, (start, end) in zip(sums_J, itertools.pairwise([0, *ends_J.tolist()]), strict=True):
        advantages_T[start:end] = total
    return advantages_T
