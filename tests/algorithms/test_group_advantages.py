"""Advantages against the papers' formulas, enumerations and hand calculation in float64."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.algorithms import (
    Advantage,
    DrGrpo,
    GroupPassAtK,
    Grpo,
    ReinforcePlusPlus,
    Rloo,
    StepCredit,
    step_advantages,
)

groups = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 3.0]), min_size=2, max_size=8)


@given(groups)
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


@pytest.mark.parametrize("advantage", [Grpo(), ReinforcePlusPlus()])
def test_a_spread_near_eps_does_not_blow_up(advantage: Advantage) -> None:
    std = 1e-6 * math.sqrt(2)
    found = advantage(torch.tensor([0.0, 2e-6], dtype=torch.float64)).tolist()
    assert found == pytest.approx([-1e-6 / (std + 1e-6), 1e-6 / (std + 1e-6)], rel=1e-5)


@given(groups, st.data())
def test_pass_at_k_is_the_papers_estimator_less_a_baseline_of_the_others(
    rewards: list[float], data: st.DataObject
) -> None:
    size = len(rewards)
    k = data.draw(st.integers(2, size))
    num_sets = math.comb(size, k)
    result = GroupPassAtK(pass_at_k=k)(torch.tensor(rewards))
    assert result.dtype == torch.float32
    if len(set(rewards)) == 1:
        assert not result.any(), "nothing to learn from equal rewards"
    for own, advantage in enumerate(result.tolist()):
        with_own = [chosen for chosen in itertools.combinations(range(size), k) if own in chosen]
        estimate = math.fsum(max(rewards[i] for i in chosen) for chosen in with_own) / num_sets
        baseline = math.fsum(max(rewards[i] for i in chosen if i != own) for chosen in with_own) / num_sets
        assert advantage == pytest.approx(size * (estimate - baseline), abs=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_gradient_of_pass_at_k_is_unbiased(k: int) -> None:
    """A policy of three actions, all its groups of five enumerated with their probabilities."""
    size, values = 5, [0.0, 1.0, 0.4]
    probabilities = np.array([0.5, 0.2, 0.3])
    # d log p(action) / d logits of a softmax
    scores = np.eye(3) - probabilities
    estimate, expected = np.zeros(3), np.zeros(3)
    for actions in itertools.product(range(3), repeat=size):
        advantage_G = GroupPassAtK(pass_at_k=k)(torch.tensor([values[a] for a in actions]))
        gradient = sum(float(a) * scores[i] for a, i in zip(advantage_G, actions, strict=True)) / size
        estimate += probabilities[list(actions)].prod() * gradient
    for actions in itertools.product(range(3), repeat=k):
        best = max(values[a] for a in actions)
        expected += probabilities[list(actions)].prod() * best * scores[list(actions)].sum(0)
    assert estimate.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_pass_at_1_is_leave_one_out_and_at_all_only_the_single_best_counts() -> None:
    rewards_G = torch.tensor([0.0, 1.0, 0.5, 0.25])
    assert torch.equal(GroupPassAtK(pass_at_k=1)(rewards_G), Rloo()(rewards_G))
    assert GroupPassAtK(pass_at_k=4)(rewards_G).tolist() == [0.0, 4 * 0.5, 0.0, 0.0]
    assert not GroupPassAtK(pass_at_k=3)(torch.tensor([0.0, 1.0, 1.0])).any()


@pytest.mark.parametrize(
    ("size", "k", "words"),
    [(4, 0, "pass_at_k\n.*greater than 0"), (4, 5, "between 1 and the group's 4"), (1, 1, "group of 1")],
)
def test_pass_at_k_refuses_what_has_no_sets(size: int, k: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GroupPassAtK(pass_at_k=k)(torch.zeros(size))


def _rewards(*rows: tuple[float, ...]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def test_the_minimum_of_what_is_still_to_come_by_hand() -> None:
    """Rewards 1, 0, 1 and -2: mean 0, unbiased variance 2."""
    first, second = step_advantages(_rewards((1.0, 0.0, 1.0), (-2.0,)), StepCredit.MINIMUM)
    unit = 1 / math.sqrt(2.0)
    assert first.tolist() == pytest.approx([0.0, 0.0, unit], rel=1e-5)
    assert second.tolist() == pytest.approx([-2 * unit], rel=1e-5)


def test_steps_are_compared_with_those_of_the_same_number_by_hand() -> None:
    """Sums to go: (3, 1), (1, 0) and (2); first steps 3, 1, 2, second ones 1, 0."""
    found = step_advantages(_rewards((2.0, 1.0), (1.0, 0.0), (2.0,)), StepCredit.PER_STEP)
    half = math.sqrt(0.5)
    assert found[0].tolist() == pytest.approx([1.0, half], rel=1e-5)
    assert found[1].tolist() == pytest.approx([-1.0, -half], rel=1e-5)
    assert found[2].tolist() == pytest.approx([0.0], abs=1e-9)
    # A step that nobody else has says nothing, however high its reward.
    alone, _ = step_advantages(_rewards((0.0, 100.0), (0.0,)), StepCredit.PER_STEP)
    assert alone[1].item() == 0.0


@pytest.mark.parametrize("credit", StepCredit)
def test_nothing_to_compare_teaches_exactly_nothing(credit: StepCredit) -> None:
    alike = [((value, value), (value,)) for value in (0.1, 1e6 / 3)]
    for rows in (((), ()), ((5.0,),), (), *alike):
        if credit is StepCredit.PER_STEP and rows in alike:
            # First steps are followed by one more step or by none.
            continue
        assert all(values_J.abs().sum() == 0.0 for values_J in step_advantages(_rewards(*rows), credit))


@pytest.mark.parametrize("credit", StepCredit)
@given(rows=st.lists(st.lists(st.floats(-1e6, 1e6), max_size=5).map(tuple), min_size=1, max_size=6))
def test_every_step_has_a_finite_credit(credit: StepCredit, rows: list[tuple[float, ...]]) -> None:
    found = step_advantages(_rewards(*rows), credit)
    assert [len(values_J) for values_J in found] == [len(row) for row in rows]
    assert all(bool(values_J.isfinite().all()) for values_J in found)
    if credit is StepCredit.MINIMUM:
        assert all(bool((values_J.diff() >= 0).all()) for values_J in found), "worse steps to come count"
