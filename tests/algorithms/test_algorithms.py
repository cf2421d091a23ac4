"""Advantages against float64 references written from the papers' formulas."""

import statistics

import torch
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.algorithms import DrGrpo, Grpo, ReinforcePlusPlus, Rloo

rewards_lists = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), min_size=2, max_size=12)


@given(rewards_lists)
def test_group_advantages_match_their_formulas(rewards: list[float]) -> None:
    rewards_G = torch.tensor(rewards, dtype=torch.float32)
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    equal = len(set(rewards)) == 1
    expected = {
        Grpo(): [(r - mean) / (std + 1e-6) for r in rewards],
        DrGrpo(): [r - mean for r in rewards],
        Rloo(): [r - o for r, o in zip(rewards, others, strict=True)],
        ReinforcePlusPlus(): [(r - mean) / (std + 1e-6) for r in rewards],
    }
    for function, values in expected.items():
        result = function(rewards_G)
        if equal:
            assert torch.equal(result, torch.zeros_like(result)), "nothing to learn from equal rewards"
        else:
            torch.testing.assert_close(
                result.double(), torch.tensor(values, dtype=torch.float64), atol=1e-5, rtol=1e-5
            )


def test_a_single_reward_has_no_batch_advantage() -> None:
    assert ReinforcePlusPlus()(torch.tensor([1.0])).tolist() == [0.0]
