"""Filters of groups: what they keep, from what distribution, and the guard against starvation."""

import functools
import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from forgeasync.algorithms import (
    AnyFilter,
    DynamicSampling,
    Filter,
    Filtered,
    FilterReason,
    GroupFacts,
    OverlongFilter,
    OverlongPenalty,
    ResampleOnCorrect,
    apply_filters,
)
from forgeasync.config import check_filters
from forgeasync.scoring import all_dropped

SECTIONS = TypeAdapter(tuple[AnyFilter, ...])


def group(
    rewards: list[float],
    *,
    lengths: list[int] | None = None,
    truncated: tuple[int, ...] = (),
    penalties: list[float] | None = None,
) -> GroupFacts:
    return GroupFacts(
        rewards=tuple(rewards),
        lengths=tuple([10] * len(rewards) if lengths is None else lengths),
        is_truncated=tuple(index in truncated for index in range(len(rewards))),
        penalties=None if penalties is None else tuple(penalties),
    )


def run(one: Filter, facts: GroupFacts, seed: int = 0) -> Filtered:
    return one(facts, np.random.default_rng(seed))


def chained(*several: Filter) -> Callable[[GroupFacts, np.random.Generator], Filtered]:
    return functools.partial(apply_filters, several)


@st.composite
def any_group(draw: st.DrawFn) -> GroupFacts:
    size = draw(st.integers(1, 16))

    def values(of: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(of, min_size=size, max_size=size)))

    return GroupFacts(
        rewards=values(st.sampled_from([0.0, 0.5, 1.0])),
        lengths=values(st.integers(1, 120)),
        is_truncated=values(st.booleans()),
        penalties=draw(st.none() | st.just(values(st.floats(0, 2)))),
    )


any_filter = st.one_of(
    st.builds(DynamicSampling, min_std=st.floats(0, 1)),
    st.builds(OverlongPenalty, max_length=st.just(100), buffer_share=st.floats(0.01, 1.0)),
    st.just(OverlongFilter()),
    st.builds(ResampleOnCorrect, num_kept=st.integers(2, 10)),
)


@given(any_group(), st.lists(any_filter, max_size=4), st.integers(0, 1000))
def test_what_is_left_adds_up(facts: GroupFacts, several: list[Filter], seed: int) -> None:
    found = run(chained(*several), facts, seed)
    assert found == run(chained(*several), facts, seed), "the same draws give the same group"
    assert list(found.kept) == sorted(set(found.kept)) and set(found.kept) <= set(range(facts.size))
    assert len(found.kept) + found.num_dropped == facts.size
    # Reference: one filter after the other on groups made anew, with the original indices carried along.
    rng = np.random.default_rng(seed)
    left = list(zip(range(facts.size), facts.rewards, strict=True))
    for one in several:
        indices, rewards = [index for index, _ in left], [reward for _, reward in left]
        renewed = group(
            rewards,
            lengths=[facts.lengths[index] for index in indices],
            truncated=tuple(place for place, index in enumerate(indices) if facts.is_truncated[index]),
            penalties=None if facts.penalties is None else [facts.penalties[index] for index in indices],
        )
        step = one(renewed, rng)
        left = [(indices[i], reward) for i, reward in zip(step.kept, step.rewards, strict=True)]
        if step.reason is not None:
            assert found.reason is step.reason and found.kept == () and found.num_dropped == facts.size
            return
    assert found.reason is None
    assert list(zip(found.kept, found.rewards, strict=True)) == left


@given(any_group(), st.floats(0, 0.6))
def test_dynamic_sampling_drops_groups_that_teach_nothing(facts: GroupFacts, min_std: float) -> None:
    found = run(DynamicSampling(min_std=min_std), facts)
    if max(facts.rewards) == min(facts.rewards):
        assert found.reason is FilterReason.ALL_EQUAL
    elif statistics.stdev(facts.rewards) < min_std:
        assert found.reason is FilterReason.LOW_SPREAD
    else:
        assert found == Filtered(
            kept=tuple(range(facts.size)), rewards=facts.rewards, reason=None, num_dropped=0
        )


def test_overlong_penalty_by_hand() -> None:
    lengths = [1, 60, 61, 80, 100, 101, 500]
    found = run(OverlongPenalty(max_length=100, buffer_share=0.4), group([1.0] * 7, lengths=lengths))
    assert found.kept == tuple(range(7)) and found.num_dropped == 0
    assert found.rewards == pytest.approx([1.0, 1.0, 1.0 - 1 / 40, 0.5, 0.0, 0.0, 0.0])


def test_overlong_filter_leaves_truncated_rollouts_out() -> None:
    found = run(OverlongFilter(), group([0.0, 1.0, 0.0, 1.0], truncated=(0, 2)))
    assert (found.kept, found.rewards, found.reason, found.num_dropped) == ((1, 3), (1.0, 1.0), None, 2)
    found = run(OverlongFilter(), group([0.0, 1.0, 0.0], truncated=(0, 2)))
    assert (found.kept, found.reason, found.num_dropped) == ((), FilterReason.OVERLONG, 3)


def test_chain_compares_rewards_as_the_filters_before_left_them() -> None:
    facts = group([1.0, 1.0, 0.0], lengths=[10, 90, 10], truncated=(2,))
    same, penalty = DynamicSampling(), OverlongPenalty(max_length=100, buffer_share=0.2)
    dropped = run(chained(OverlongFilter(), same, penalty), facts)
    assert (dropped.reason, dropped.num_dropped) == (FilterReason.ALL_EQUAL, 3)
    kept = run(chained(OverlongFilter(), penalty, same), facts)
    assert (kept.kept, kept.rewards, kept.num_dropped) == ((0, 1), (1.0, 0.5), 1)


@pytest.mark.parametrize("num_positive", range(17))
def test_resampling_keeps_the_proportion(num_positive: int) -> None:
    facts = group([1.0] * num_positive + [0.0] * (16 - num_positive))
    found = run(ResampleOnCorrect(num_kept=8), facts)
    assert len(found.kept) == 8 and found.num_dropped == 8
    half_up = math.floor(num_positive / 2 + 0.5)
    # 15 of 16 would leave no negative.
    assert sum(found.rewards) == (7 if num_positive == 15 else half_up)


def test_resampling_of_a_small_group_keeps_it() -> None:
    assert run(ResampleOnCorrect(num_kept=4), group([1.0, 1.0, 0.0])).kept == (0, 1, 2)


def inclusion(weights: list[float], num: int) -> list[float]:
    """Probability of each of ``weights`` to be among ``num`` successive draws, over all their orders."""
    total = [0.0] * len(weights)
    for order in itertools.permutations(range(len(weights)), num):
        probability, left = 1.0, math.fsum(weights)
        for index in order:
            probability *= weights[index] / left
            left -= weights[index]
        for index in order:
            total[index] += probability
    return total


def test_resampling_draws_from_the_stated_distribution() -> None:
    penalties = [0.0, 0.25, 1.0, 0.1, 0.0, 9.0, 9.0, 0.0, 0.0]
    rewards = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    resample = ResampleOnCorrect(num_kept=5, smoothing=0.2)
    rng, num_draws = np.random.default_rng(5), 20000
    counts = np.zeros(9)
    for _ in range(num_draws):
        counts[list(resample(group(rewards, penalties=penalties), rng).kept)] += 1
    # 5 of 9: 25/9 of the five positives, rounded to 3, and 2 of the four negatives.
    expected = [*inclusion([1 / (penalty + 0.2) for penalty in penalties[:5]], 3), *[0.5] * 4]
    error = np.sqrt(np.multiply(expected, np.subtract(1.0, expected)) / num_draws)
    assert np.all(np.abs(counts / num_draws - expected) < 4.5 * error), counts / num_draws
    assert counts[2] < counts[1] < counts[3] < counts[0], "faults make a positive rarer"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DynamicSampling(min_std=-0.1), "min_std\n.*greater than or equal to 0"),
        (lambda: OverlongPenalty(max_length=10, buffer_share=0.0), "buffer_share\n.*greater than 0"),
        (lambda: OverlongPenalty(max_length=10, buffer_share=1.1), "buffer_share\n.*less than or equal to 1"),
        (lambda: ResampleOnCorrect(num_kept=1), "num_kept\n.*greater than or equal to 2"),
        (lambda: ResampleOnCorrect(num_kept=2, smoothing=0.0), "smoothing\n.*greater than or equal"),
    ],
)
def test_senseless_filters_are_refused(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_sections_become_the_filters_they_name() -> None:
    sections = SECTIONS.validate_python(
        [
            {"kind": "overlong_filter"},
            {"kind": "resample_on_correct", "num_kept": 3, "min_positive_reward": 2.0, "smoothing": 1e-9},
            {"kind": "dynamic_sampling", "min_std": 0.6},
            {"kind": "overlong_penalty", "max_length": 10, "buffer_share": 0.5},
        ]
    )
    facts = group(
        [3.0, 3.0, 3.0, 3.0, 1.0, 1.0], lengths=[10] * 6, truncated=(3,), penalties=[0, 9.0, 0, 0, 0, 0]
    )
    found = run(chained(*sections), facts)
    assert found.kept[:2] == (0, 2) and found.kept[2] in (4, 5) and found.num_dropped == 3
    assert found.rewards == (2.0, 2.0, 0.0)
    assert run(chained(*sections[2:3]), group([1.0, 0.5])).reason is FilterReason.LOW_SPREAD
    assert run(chained(), facts).kept == tuple(range(6))


def test_filters_are_checked_against_the_run() -> None:
    sections = SECTIONS.validate_python(
        [
            {"kind": "dynamic_sampling"},
            {"kind": "overlong_penalty", "max_length": 160, "buffer_share": 0.2},
            {"kind": "overlong_penalty", "max_length": 159, "buffer_share": 0.2},
            {"kind": "resample_on_correct", "num_kept": 8},
            {"kind": "resample_on_correct", "num_kept": 7},
        ]
    )
    refusals = check_filters(sections, field="algorithm.filters", group_size=8, max_response_tokens=128)
    assert [key for key, *_ in refusals] == ["algorithm.filters.1.max_length", "algorithm.filters.3.num_kept"]


def test_a_run_whose_groups_are_all_dropped_is_told_why() -> None:
    text = all_dropped(
        [(FilterReason.ALL_EQUAL, 1.0), (FilterReason.OVERLONG, 0.25), (FilterReason.ALL_EQUAL, 1.0)]
    )
    for words in ("3 groups in a row", "2 all_equal, 1 overlong", "limit 3", "mean reward 0.750"):
        assert words in text
    assert "sampling.max_response_tokens" in text and "min_std" not in text


def test_a_reward_at_the_threshold_is_positive() -> None:
    facts = group([0.5, 0.5, *[0.0] * 6])
    for seed in range(5):
        assert sorted(run(ResampleOnCorrect(num_kept=4), facts, seed).rewards) == [0.0, 0.0, 0.0, 0.5]


def test_a_filter_that_keeps_nothing_drops_the_group() -> None:
    assert group([0.0, 1.0]).keep([]) == Filtered(
        kept=(), rewards=(), reason=FilterReason.NONE_KEPT, num_dropped=2
    )
    with pytest.raises(ValueError, match="1 rewards for 2 kept rollouts"):
        group([0.0, 1.0]).keep([0, 1], [1.0])


@pytest.mark.parametrize("reason", FilterReason)
def test_every_reason_to_drop_groups_comes_with_advice(reason: FilterReason) -> None:
    assert f"{reason.value}:" in all_dropped([(reason, 0.5)])
