"""Advantages: estimators from the rewards of a group, and advantages of tokens from rewards of steps.

Estimators compute in the dtype of the rewards.

Shape suffixes: G rollouts of one group, N rollouts of a whole batch, J steps of one response, T tokens of one
response.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from forgeasync.algorithms.own_results import check_advantages
from forgeasync.schema import OWN_INSTANCE, SHORT_FORM, Count, PythonCode, Section, build_code

if TYPE_CHECKING:
    import torch


EPS = 1e-6
"""Added to standard deviations before a division by them, because they can be 0."""


class Advantage(Section):
    """Base class of advantage estimators, which compare the rewards of rollouts.

    To define your own advantage, write a class like those below:

        import forgeasync as fa


        class AgainstMedian(fa.Advantage):
            '''r minus the median of the group.'''

            scale: float = 1.0

            def __call__(self, rewards_G):
                return self.scale * (rewards_G - rewards_G.median())

    To train with it, set ``advantage: {kind: python, factory: my_losses.AgainstMedian, options: {scale:
    2.0}}``. A function of ``rewards_G``, or a function that returns one, works as well. A class that compares
    the rewards of a whole batch declares ``over_batch: ClassVar[bool] = True``.
    """

    over_batch: ClassVar[bool] = False
    """Whether ``__call__`` gets the rewards of a whole batch at once instead of those of one group."""
    smallest_group: ClassVar[int] = 2
    """Minimum number of rollouts of a group."""

    @abstractmethod
    def __call__(self, rewards_G: torch.Tensor) -> torch.Tensor:
        """Return an advantage for each reward.

        Args:
            rewards_G: Rewards of a group, floating point. With ``over_batch``, those of a whole batch [N].

        Returns:
            Finite advantages, one for each reward.
        """

    def of_batch(self, rewards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the advantages of each group of a batch, given the rewards [G] of each."""
        if not self.over_batch:
            return [self(rewards_G) for rewards_G in rewards]
        import torch

        return list(self(torch.cat(list(rewards))).split([len(rewards_G) for rewards_G in rewards]))


class Grpo(Advantage):
    """(r - mean) / (unbiased std + 1e-6) within a group; exactly 0 if all rewards are equal.

        >>> fa.Grpo()(torch.tensor([1.0, 0.0, 0.0, 1.0]))
        tensor([ 0.8660, -0.8660, -0.8660,  0.8660])

    Source: Shao et al., "DeepSeekMath", 2024, section 4.1.
    """

    kind: Literal["grpo"] = "grpo"

    def __call__(self, rewards_G: torch.Tensor) -> torch.Tensor:
        centered_G = _zero_if_equal(rewards_G, rewards_G - rewards_G.mean())
        return _zero_if_equal(rewards_G, centered_G / (rewards_G.std() + EPS))


class DrGrpo(Advantage):
    """r - mean within a group, without division by the standard deviation.

    Source: Liu et al., "Understanding R1-Zero-Like Training", 2025, equation for Dr. GRPO.
    """

    kind: Literal["dr_grpo"] = "dr_grpo"

    def __call__(self, rewards_G: torch.Tensor) -> torch.Tensor:
        return _zero_if_equal(rewards_G, rewards_G - rewards_G.mean())


class Rloo(Advantage):
    """r minus the mean of the group's other rewards.

        >>> fa.Rloo()(torch.tensor([1.0, 0.0, 0.0]))
        tensor([ 1.0000, -0.5000, -0.5000])

    Source: Ahmadian et al., "Back to Basics", 2024, equation 7.
    """

    kind: Literal["rloo"] = "rloo"

    def __call__(self, rewards_G: torch.Tensor) -> torch.Tensor:
        group_size = rewards_G.numel()
        others_G = (rewards_G.sum() - rewards_G) / (group_size - 1)
        return _zero_if_equal(rewards_G, rewards_G - others_G)


class ReinforcePlusPlus(Advantage):
    """(r - mean) / (unbiased std + 1e-6) over the whole batch.

    Source: Hu, "REINFORCE++", 2025, equation 6 (without the KL term).
    """

    over_batch: ClassVar[bool] = True
    smallest_group: ClassVar[int] = 1

    kind: Literal["reinforce_pp"] = "reinforce_pp"

    def __call__(self, rewards_N: torch.Tensor) -> torch.Tensor:
        return normalized(rewards_N)


class GroupPassAtK(Advantage):
    """Advantages whose policy gradient is that of max@k, the expected best reward of k rollouts.

    For binary rewards, max@k is pass@k. The advantage of rollout i is

        k * mean over all sets J of k - 1 other rollouts of (max of r over J and i, minus max of r over J)

    This is G * s_i^(loo-1). The estimator s_i is a sum over sets I of k rollouts that contain i, of
    (max of r over I) / binomial(G, k). A baseline that leaves i out of every I is subtracted. The factor G
    cancels the mean over the group that an aggregation takes; with it, k = 1 equals ``Rloo``. The baseline
    does not depend on r_i, so the gradient remains unbiased. k = G is allowed, because the baseline uses sets
    of k - 1; then only a rollout better than all others has an advantage. With k > 1 no advantage is
    negative. All are exactly 0 if all rewards are equal.

    Source: Walder and Karkhanis, "Pass@K Policy Optimization", 2025, equation 33, which has the lowest
    variance.
    """

    kind: Literal["group_pass_at_k"] = "group_pass_at_k"
    pass_at_k: Count
    """k: number of rollouts of which the best one counts; at most the rollouts of a group."""

    def __call__(self, rewards_G: torch.Tensor) -> torch.Tensor:
        """Return an advantage for each reward.

        Raises:
            ValueError: There is only one rollout, or fewer than ``pass_at_k``.
        """
        k, group_size = self.pass_at_k, rewards_G.numel()
        if group_size < 2:
            raise ValueError(f"group_pass_at_k: a group of {group_size}; must be of at least 2 rollouts")
        if k > group_size:
            raise ValueError(
                f"group_pass_at_k: k = {k}; must be between 1 and the group's {group_size} rollouts"
            )
        if k == 1:
            return Rloo()(rewards_G)
        # The j-th smallest reward is the best in comb(j, k - 2) of all sets J. Rollout i improves on the sets
        # whose best reward is less than its own.
        sorted_G = rewards_G.double().sort().values
        num_sets = math.comb(group_size - 1, k - 1)
        share_G = sorted_G.new_tensor([math.comb(j, k - 2) / num_sets for j in range(group_size)])
        gains_GG = (rewards_G.double()[:, None] - sorted_G).clamp(min=0.0)
        return (k * (gains_GG @ share_G)).to(rewards_G.dtype)


class PythonAdvantage(PythonCode, Advantage):
    """Your own advantage, ``(rewards_G) -> advantages_G``. ``Advantage`` has an example.

    A call raises ValueError if your code returns anything else, nan or infinity.
    """

    def __call__(self, rewards_G: torch.Tensor) -> torch.Tensor:
        return check_advantages(self._own()(rewards_G), rewards_G=rewards_G)

    def of_batch(self, rewards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = self._own()
        if not isinstance(own, Advantage):
            return super().of_batch(rewards)
        return [
            check_advantages(advantages_G, rewards_G=rewards_G)
            for advantages_G, rewards_G in zip(own.of_batch(rewards), rewards, strict=True)
        ]

    def _own(self) -> Callable[..., object]:
        return build_code(self, ("rewards_G",))


AnyAdvantage = Annotated[
    Grpo | DrGrpo | Rloo | ReinforcePlusPlus | GroupPassAtK | PythonAdvantage,
    Field(discriminator="kind"),
    *SHORT_FORM,
    OWN_INSTANCE,
]
"""Section ``algorithm.advantage`` of a config: one of the advantages above, or your own."""


def normalized(values_N: torch.Tensor) -> torch.Tensor:
    """Return (value - mean) / (unbiased std + 1e-6) over all values; exactly 0 if all are equal."""
    std = values_N.std() if values_N.numel() > 1 else values_N.new_zeros(())
    return _zero_if_equal(values_N, (values_N - values_N.mean()) / (std + EPS))


def _zero_if_equal(rewards: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    # Rounding of the mean would otherwise leave advantages such as 1e-8.
    return advantages.new_zeros(advantages.shape) if bool((rewards == rewards[0]).all()) else advantages


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

    Args:
        step_rewards_G: Rewards of the steps of each rollout, in order, each [J].
        credit: Method that compares them.
    """
    match credit:
        case StepCredit.SUM_TO_GO:
            return [_sums_to_go(values_J) for values_J in _normalized_together(step_rewards_G)]
        case StepCredit.MINIMUM:
            return [
                values_J.flip(0).cummin(0).values.flip(0) if values_J.numel() else values_J
                for values_J in _normalized_together(step_rewards_G)
            ]
        case StepCredit.PER_STEP:
            return _normalized_by_place([_sums_to_go(rewards_J.double()) for rewards_J in step_rewards_G])


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
