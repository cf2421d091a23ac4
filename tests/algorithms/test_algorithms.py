"""Advantages and objectives against float64 references written from the papers' formulas."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.algorithms import DrGrpo, Grpo, PpoClip, ReinforcePlusPlus, Rloo, Supervised
from tests.support.tokens import make_tokens

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


@given(
    logprobs=st.lists(st.floats(-5, -0.01), min_size=1, max_size=8),
    shift=st.floats(-1, 1),
    advantage=st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0]),
)
def test_ppo_clip_matches_its_formula_and_gradient(
    logprobs: list[float], shift: float, advantage: float
) -> None:
    low, high = 0.2, 0.28
    current_T = torch.tensor(logprobs, requires_grad=True)
    behavior_T = torch.tensor([value - shift for value in logprobs])
    mask_T = torch.ones(len(logprobs), dtype=torch.bool)
    losses_T, sums = PpoClip(clip_low=low, clip_high=high)(
        make_tokens(
            current_T,
            behavior_logprobs_T=behavior_T,
            advantages_T=torch.full_like(behavior_T, advantage),
            mask_T=mask_T,
        )
    )
    ratio = math.exp(shift)
    clipped = min(max(ratio, 1 - low), 1 + high)
    expected = -min(ratio * advantage, clipped * advantage)
    assert losses_T.tolist() == pytest.approx([expected] * len(logprobs), abs=1e-4)
    losses_T.sum().backward()
    is_clipped = clipped * advantage < ratio * advantage
    if abs(ratio - clipped) > 1e-3 or ratio == clipped:
        gradient = 0.0 if is_clipped else -ratio * advantage
        assert current_T.grad is not None
        assert current_T.grad.tolist() == pytest.approx([gradient] * len(logprobs), abs=1e-3)
        assert sums["objective/clipped_share"].item() == is_clipped * len(logprobs)


def test_tokens_without_a_behavior_logprob_neither_overflow_nor_count() -> None:
    logprobs_T = torch.tensor([-1.0, -200.0], requires_grad=True)
    behavior_T = torch.tensor([-1.0, -1e9])
    mask_T = torch.tensor([True, False])
    losses_T, sums = PpoClip()(make_tokens(logprobs_T, behavior_logprobs_T=behavior_T, mask_T=mask_T))
    losses_T[0].backward()
    assert torch.isfinite(losses_T).all() and logprobs_T.grad.tolist() == [-1.0, 0.0]
    assert sums["objective/clipped_share"].item() == 0


def test_supervised_is_the_negative_log_likelihood() -> None:
    logprobs_T = torch.tensor([-1.0, -2.0])
    losses_T, _ = Supervised()(make_tokens(logprobs_T, advantages_T=logprobs_T))
    assert losses_T.tolist() == [1.0, 2.0]
