"""Advantages of pass@k and of step rewards against enumerations and hand calculation in float64."""

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
    GroupPassAtK,
    Grpo,
    ReinforcePlusPlus,
    Rloo,
    StepCredit,
    from_step_rewards,
    step_advantages,
)

groups = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 3.0]), min_size=2, max_size=8)


def mean_gain(rewards: list[float], k: int, own: int) -> float:
    """The mean over all sets of k - 1 others of what one rollout adds to their best; k > 1."""
    others = [reward for index, reward in enumerate(rewards) if index != own]
    sets = list(itertools.combinations(others, k - 1))
    return math.fsum(max(rewards[own], *chosen) - max(chosen) for chosen in sets) / len(sets)


@given(groups, st.data())
def test_pass_at_k_is_the_mean_gain_over_all_sets_of_others(
    rewards: list[float], data: st.DataObject
) -> None:
    k = data.draw(st.integers(2, len(rewards)))
    result = GroupPassAtK(pass_at_k=k)(torch.tensor(rewards))
    expected = [k * mean_gain(rewards, k, own) for own in range(len(rewards))]
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx(expected, abs=1e-6)
    if len(set(rewards)) == 1:
        assert not result.any(), "nothing to learn from equal rewards"


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
    for own, advantage in enumerate(GroupPassAtK(pass_at_k=k)(torch.tensor(rewards)).tolist()):
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


@given(st.integers(2, 40), st.data())
def test_binary_rewards_agree_with_the_analytic_pass_at_k(size: int, data: st.DataObject) -> None:
    k, num_correct = data.draw(st.integers(2, size)), data.draw(st.integers(1, size))
    rewards = [1.0] * num_correct + [0.0] * (size - num_correct)
    result = GroupPassAtK(pass_at_k=k)(torch.tensor(rewards)).tolist()

    def estimate(num: int, correct: int, draws: int) -> float:
        """The unbiased pass@k of Chen et al., "Evaluating Large Language Models Trained on Code", 2021."""
        return 1.0 - math.comb(num - correct, draws) / math.comb(num, draws)

    # The analytic advantages are k for a correct rollout and k * pass@(k-1) of the others for a wrong one;
    # what is taken off both is k * pass@(k-1) of the others.
    correct = k * (1.0 - estimate(size - 1, num_correct - 1, k - 1))
    assert result == pytest.approx([correct] * num_correct + [0.0] * (size - num_correct), rel=1e-6)


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


def test_step_rewards_by_hand() -> None:
    # Rewards 1, 0, 1, -2: mean 0, unbiased variance 6 / 3 = 2.
    first, second = from_step_rewards(
        [torch.tensor([1.0, 0.0]), torch.tensor([1.0, -2.0])],
        [torch.tensor([2, 3]), torch.tensor([1, 4])],
        [5, 4],
    )
    unit = 1 / math.sqrt(2.0)
    assert first.tolist() == pytest.approx([unit, unit, 0.0, 0.0, 0.0], rel=1e-5)
    assert second.tolist() == pytest.approx([-unit, -2 * unit, -2 * unit, -2 * unit], rel=1e-5)


@given(st.integers(0, 2**32 - 1))
def test_step_rewards_match_the_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, size=rng.integers(1, 6)).tolist()
    ends = [sorted(rng.permutation(np.arange(1, n + 1))[: rng.integers(0, n + 1)].tolist()) for n in lengths]
    rewards = [rng.normal(2.0, 1.0, len(own)).astype(np.float32).tolist() for own in ends]
    result = from_step_rewards(
        [torch.tensor(own) for own in rewards],
        [torch.tensor(own, dtype=torch.int64) for own in ends],
        lengths,
    )
    whole = [reward for own in rewards for reward in own]
    mean = statistics.fmean(whole) if whole else 0.0
    std = statistics.stdev(whole) if len(whole) > 1 else 0.0
    for found, own_rewards, own_ends, length in zip(result, rewards, ends, lengths, strict=True):
        assert found.dtype == torch.float32
        assert found.tolist() == pytest.approx(
            [
                math.fsum(
                    (reward - mean) / (std + 1e-6)
                    for reward, end in zip(own_rewards, own_ends, strict=True)
                    if end > token
                )
                for token in range(length)
            ],
            abs=1e-4,
        )


@pytest.mark.parametrize("value", [0.1, 1e6 / 3])
def test_equal_step_rewards_teach_exactly_nothing(value: float) -> None:
    result = from_step_rewards(
        [torch.full((3,), value), torch.full((1,), value), torch.zeros(0)],
        [torch.tensor([1, 2, 7]), torch.tensor([2]), torch.zeros(0, dtype=torch.int64)],
        [7, 3, 2],
    )
    assert [own.tolist() for own in result] == [[0.0] * 7, [0.0] * 3, [0.0] * 2]


@pytest.mark.parametrize(
    ("rewards", "ends", "lengths", "words"),
    [
        ([[1.0]], [[1]], [1, 2], "1 step_rewards, 1 step_ends and 2 lengths"),
        ([[1.0], [1.0, 2.0]], [[1], [1]], [1, 2], "rollout 1 has step_rewards of shape"),
        ([[1.0, 2.0]], [[2, 2]], [3], r"step_ends \[2, 2\]; must increase"),
        ([[1.0, 2.0]], [[0, 2]], [3], "begin at 1 or later"),
        ([[1.0, 2.0]], [[1, 4]], [3], "ends at 4; must be within its 3 tokens"),
        ([[1.0, math.nan]], [[1, 2]], [3], "must be finite"),
    ],
)
def test_steps_that_do_not_fit_are_refused(
    rewards: list[list[float]], ends: list[list[int]], lengths: list[int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        from_step_rewards(
            [torch.tensor(own) for own in rewards], [torch.tensor(own) for own in ends], lengths
        )


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
    for rows in (((0.3, 0.3), (0.3,)), ((), ()), ((5.0,),), ()):
        for values_J in step_advantages(_rewards(*rows), credit):
            if credit is StepCredit.PER_STEP and rows == ((0.3, 0.3), (0.3,)):
                # First steps are followed by one more step or by none.
                continue
            assert values_J.abs().sum() == 0.0


@pytest.mark.parametrize("credit", StepCredit)
@given(rows=st.lists(st.lists(st.floats(-1e6, 1e6), max_size=5).map(tuple), min_size=1, max_size=6))
def test_every_step_has_a_finite_credit(credit: StepCredit, rows: list[tuple[float, ...]]) -> None:
    found = step_advantages(_rewards(*rows), credit)
    assert [len(values_J) for values_J in found] == [len(row) for row in rows]
    assert all(bool(values_J.isfinite().all()) for values_J in found)
    if credit is StepCredit.MINIMUM:
        assert all(bool((values_J.diff() >= 0).all()) for values_J in found), "worse steps to come count"
