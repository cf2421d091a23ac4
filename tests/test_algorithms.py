"""Advantages and objectives against float64 references written from the papers' formulas."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.algorithms import advantages
from forgeasync.algorithms.objectives import ppo_clip, supervised

rewards_lists = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), min_size=2, max_size=12)


@given(rewards_lists)
def test_group_advantages_match_their_formulas(rewards: list[float]) -> None:
    rewards_G = torch.tensor(rewards, dtype=torch.float32)
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    equal = len(set(rewards)) == 1
    expected = {
        advantages.grpo: [(r - mean) / (std + 1e-6) for r in rewards],
        advantages.dr_grpo: [r - mean for r in rewards],
        advantages.rloo: [r - o for r, o in zip(rewards, others, strict=True)],
        advantages.reinforce_pp: [(r - mean) / (std + 1e-6) for r in rewards],
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
    assert advantages.reinforce_pp(torch.tensor([1.0])).tolist() == [0.0]


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
    losses_T, sums = ppo_clip(low, high)(
        logprobs_T=current_T,
        behavior_logprobs_T=behavior_T,
        advantages_T=torch.full_like(behavior_T, advantage),
        mask_T=mask_T,
        sequence_ids_T=torch.zeros(len(logprobs), dtype=torch.long),
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
    losses_T, sums = ppo_clip()(
        logprobs_T=logprobs_T,
        behavior_logprobs_T=torch.tensor([-1.0, -1e9]),
        advantages_T=torch.ones(2),
        mask_T=torch.tensor([True, False]),
        sequence_ids_T=torch.zeros(2, dtype=torch.long),
    )
    losses_T[0].backward()
    assert torch.isfinite(losses_T).all() and logprobs_T.grad.tolist() == [-1.0, 0.0]
    assert sums["objective/clipped_share"].item() == 0


def test_supervised_is_the_negative_log_likelihood() -> None:
    logprobs_T = torch.tensor([-1.0, -2.0])
    losses_T, _ = supervised()(
        logprobs_T=logprobs_T,
        behavior_logprobs_T=logprobs_T,
        advantages_T=logprobs_T,
        mask_T=torch.ones(2, dtype=torch.bool),
        sequence_ids_T=torch.zeros(2, dtype=torch.long),
    )
    assert losses_T.tolist() == [1.0, 2.0]
