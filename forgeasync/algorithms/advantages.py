"""From rewards to advantages. float32 in, float32 out.

Shape suffixes: G rollouts of one group, N rollouts of a whole batch.
"""

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


def _zero_if_equal(rewards: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    # Rounding in the mean would otherwise leave 1e-8 where there is nothing to learn.
    return torch.zeros_like(advantages) if bool((rewards == rewards[0]).all()) else advantages
