"""From rewards to advantages, in the dtype of the rewards.

Shape suffixes: G rollouts of one group, N rollouts of a whole batch, T tokens of one response, J steps of one
response.
"""

import itertools
import math
from collections.abc import Sequence

import torch


def grpo(rewards_G: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """(r - mean) / (unbiased std + eps) within a group; exactly 0 where all rewards are equal.

    Source: Shao et al., "DeepSeekMath", 2024, section 4.1.
    """
    return _zero_if_equal(rewards_G, dr_grpo(rewards_G) / (rewards_G.std() + eps))


def dr_grpo(rewards_G: torch.Tensor) -> torch.Tensor:
    """r - mean within a group, without the division by the standard deviation.

    Source: Liu et al., "Understanding R1-Zero-Like Training", 2025, equation for Dr. GRPO.
    """
    return _zero_if_equal(rewards_G, rewards_G - rewards_G.mean())


def rloo(rewards_G: torch.Tensor) -> torch.Tensor:
    """r minus the mean of the group's other rewards.

    Source: Ahmadian et al., "Back to Basics", 2024, equation 7.
    """
    group_size = rewards_G.numel()
    others_G = (rewards_G.sum() - rewards_G) / (group_size - 1)
    return _zero_if_equal(rewards_G, rewards_G - others_G)


def reinforce_pp(rewards_N: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """(r - mean) / (unbiased std + eps) over the whole batch.

    Source: Hu, "REINFORCE++", 2025, equation 6 (without the KL term).
    """
    std = rewards_N.std() if rewards_N.numel() > 1 else torch.zeros(())
    return _zero_if_equal(rewards_N, (rewards_N - rewards_N.mean()) / (std + eps))


def group_pass_at_k(rewards_G: torch.Tensor, k: int) -> torch.Tensor:
    """Advantages whose policy gradient is that of max@k, the expected best reward of k rollouts.

    For binary rewards max@k is pass@k. Rollout i has

        k * mean over all sets J of k - 1 other rollouts of (max of r over J and i, minus max of r over J)

    which is G * s_i^(loo-1): the estimator s_i = sum over sets I of k rollouts with i in them of
    (max of r over I) / binomial(G, k), less a baseline that leaves i out of every I. The factor G makes up
    for the mean over the group that an aggregation takes, and k = 1 is then ``rloo``. The baseline knows
    nothing of r_i, so that the gradient stays unbiased. k = G has no sets of k that leave i out and needs
    none, as the baseline looks at k - 1: only a rollout better than all the others has an advantage then.
    With k > 1 no advantage is negative. Exactly 0 where all rewards are equal.

    Source: Walder and Karkhanis, "Pass@K Policy Optimization", 2025, equation 33, the one of lowest variance.

    Raises:
        ValueError: ``k`` is not in 1 .. G, or there is only one rollout.
    """
    group_size = rewards_G.numel()
    if group_size < 2:
        raise ValueError(f"group_pass_at_k: a group of {group_size}; must be of at least 2 rollouts")
    if not 1 <= k <= group_size:
        raise ValueError(f"group_pass_at_k: k = {k}; must be between 1 and the group's {group_size} rollouts")
    if k == 1:
        return rloo(rewards_G)
    # comb(j, k - 2) of all J have the j-th smallest reward as their best; i improves on those below its own.
    sorted_G = rewards_G.double().sort().values
    num_sets = math.comb(group_size - 1, k - 1)
    share_G = sorted_G.new_tensor([math.comb(j, k - 2) / num_sets for j in range(group_size)])
    gains_GG = (rewards_G.double()[:, None] - sorted_G).clamp(min=0.0)
    return (k * (gains_GG @ share_G)).to(rewards_G.dtype)


def from_step_rewards(
    step_rewards_G: Sequence[torch.Tensor],
    step_ends_G: Sequence[torch.Tensor],
    lengths_G: Sequence[int],
    eps: float = 1e-6,
) -> list[torch.Tensor]:
    """Advantages of tokens from rewards of steps: float32 [T] for each rollout of a group.

    ``step_rewards_G[i]`` and ``step_ends_G[i]`` [J] are the rewards of the steps of rollout i and the tokens,
    exclusive and increasing, where they end in its response of ``lengths_G[i]``. Rewards are normalized by
    mean and unbiased standard deviation (plus ``eps``) over all steps of the group; a token's advantage is
    the sum over the steps that end at it or after it. Tokens after the last step have 0, and all have
    exactly 0 where all steps have the same reward.

    Source: Shao et al., "DeepSeekMath", 2024, section 4.1.3.

    Raises:
        ValueError: the arguments are not of one length, or the ends do not fit their rewards or the response.
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
    if sum(rewards_J.numel() for rewards_J in step_rewards_G) == 0:
        return [torch.zeros(length) for length in lengths_G]
    # In float64: the sums below are differences of sums over the whole response.
    whole_N = torch.cat([rewards_J.double() for rewards_J in step_rewards_G])
    split = [rewards_J.numel() for rewards_J in step_rewards_G]
    return [
        _sums_from_here(normalized_J, ends_J, length).float()
        for normalized_J, ends_J, length in zip(
            reinforce_pp(whole_N, eps).split(split), step_ends_G, lengths_G, strict=True
        )
    ]


def _check_steps(index: int, rewards_J: torch.Tensor, ends_J: torch.Tensor, length: int) -> None:
    where = f"from_step_rewards: rollout {index}"
    if rewards_J.ndim != 1 or rewards_J.shape != ends_J.shape:
        raise ValueError(
            f"{where} has step_rewards of shape {tuple(rewards_J.shape)} and step_ends of shape "
            f"{tuple(ends_J.shape)}; must be one reward and one end for every step"
        )
    if not bool(torch.isfinite(rewards_J).all()):
        raise ValueError(f"{where} has step_rewards {rewards_J.tolist()}; must be finite")
    ends = [0, *ends_J.tolist()]
    if any(end <= before for before, end in itertools.pairwise(ends)):
        raise ValueError(f"{where} has step_ends {ends[1:]}; must increase, from 1 at least")
    if ends[-1] > length:
        raise ValueError(f"{where} has a step that ends at {ends[-1]}; must be within its {length} tokens")


def _sums_from_here(values_J: torch.Tensor, ends_J: torch.Tensor, length: int) -> torch.Tensor:
    """For every token [T] the sum of the values of steps that end after its position."""
    sums_J = values_J.flip(0).cumsum(0).flip(0)
    starts_J = torch.cat([ends_J.new_zeros(1), ends_J])[:-1]
    advantages_T = values_J.new_zeros(length)
    for total, start, end in zip(sums_J, starts_J.tolist(), ends_J.tolist(), strict=True):
        advantages_T[start:end] = total
    return advantages_T


def _zero_if_equal(rewards: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    # Rounding in the mean would otherwise leave 1e-8 where there is nothing to learn.
    return torch.zeros_like(advantages) if bool((rewards == rewards[0]).all()) else advantages
