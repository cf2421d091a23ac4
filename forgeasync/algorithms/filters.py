"""Which rollouts of a scored group are trained on, and with which rewards.

A filter looks at the facts of one group and says what it keeps. Filters are pure: what they draw comes from
the generator of random numbers that they are given. ``chain`` puts several one after the other, and their
order counts: a penalty first and a comparison of rewards after it compares penalized rewards.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np


class FilterReason(StrEnum):
    """Why a whole group is dropped."""

    ALL_EQUAL = "all_equal"
    """All rewards are equal: no advantage differs from 0."""
    LOW_SPREAD = "low_spread"
    """The rewards' standard deviation is below a threshold."""
    OVERLONG = "overlong"
    """Fewer than two rollouts were not truncated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What filters know of a group; one entry for each rollout."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Response tokens."""
    is_truncated: tuple[bool, ...]
    penalties: tuple[float, ...] | None = None
    """Faults of a rollout besides its reward, such as the share of its tool calls that failed; at least 0.
    None is 0 for all."""

    def __post_init__(self) -> None:
        num = len(self.rewards)
        assert num > 0 and len(self.lengths) == len(self.is_truncated) == num
        assert self.penalties is None or (len(self.penalties) == num and min(self.penalties) >= 0.0)

    @property
    def size(self) -> int:
        """Rollouts in the group."""
        return len(self.rewards)

    def take(self, kept: Sequence[int], rewards: tuple[float, ...]) -> "GroupFacts":
        """The facts of the rollouts at these indices, with other rewards."""
        return GroupFacts(
            rewards=rewards,
            lengths=tuple(self.lengths[index] for index in kept),
            is_truncated=tuple(self.is_truncated[index] for index in kept),
            penalties=None if self.penalties is None else tuple(self.penalties[index] for index in kept),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """What is left of a group."""

    kept: tuple[int, ...]
    """Indices of the rollouts to train on, increasing; empty: the whole group is dropped."""
    rewards: tuple[float, ...]
    """Of the kept rollouts."""
    reason: FilterReason | None
    """Why the whole group is dropped; None where any of it is kept."""
    num_dropped: int
    """Rollouts left out; all of them where the group is dropped."""

    def __post_init__(self) -> None:
        assert len(self.kept) == len(self.rewards)
        assert (self.reason is None) == (len(self.kept) > 0)


class GroupFilter(Protocol):
    def __call__(self, facts: GroupFacts, rng: np.random.Generator) -> Filtered: ...


def dynamic_sampling(min_std: float = 0.0) -> GroupFilter:
    """Drops groups that teach nothing: all rewards equal or, if asked for, hardly different.

    Source: Yu et al., "DAPO", 2025, equation 11, whose constraint on binary rewards is that neither none nor
    all are correct. ``min_std`` is ours: groups whose rewards have a lower unbiased standard deviation are
    dropped.

    Raises:
        ValueError: ``min_std`` is negative.
    """
    if min_std < 0.0:
        raise ValueError(f"dynamic_sampling: min_std = {min_std}; must be at least 0")

    def keep(facts: GroupFacts, rng: np.random.Generator) -> Filtered:
        if len(set(facts.rewards)) == 1:
            return _dropped(facts, FilterReason.ALL_EQUAL)
        if statistics.stdev(facts.rewards) < min_std:
            return _dropped(facts, FilterReason.LOW_SPREAD)
        return _kept(facts, range(facts.size))

    return keep


def _dropped(facts: GroupFacts, reason: FilterReason) -> Filtered:
    return Filtered(kept=(), rewards=(), reason=reason, num_dropped=facts.size)


def _kept(facts: GroupFacts, kept: Sequence[int]) -> Filtered:
    return Filtered(
        kept=tuple(kept),
        rewards=tuple(facts.rewards[index] for index in kept),
        reason=None,
        num_dropped=facts.size - len(kept),
    )


def overlong_penalty(max_length: int, buffer: int) -> GroupFilter:
    """Lowers the rewards of long responses; keeps all of them.

    To the reward of a response of n tokens is added 0 up to max_length - buffer, then
    (max_length - buffer - n) / buffer down to -1 at max_length, and -1 beyond. Source: Yu et al., "DAPO",
    2025, equation 13.

    Raises:
        ValueError: ``buffer`` is not in 1 .. ``max_length``.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"overlong_penalty: buffer = {buffer}; must be between 1 and max_length = {max_length}"
        )

    def keep(facts: GroupFacts, rng: np.random.Generator) -> Filtered:
        rewards = tuple(
            reward - min(max((length - (max_length - buffer)) / buffer, 0.0), 1.0)
            for reward, length in zip(facts.rewards, facts.lengths, strict=True)
        )
        return Filtered(kept=tuple(range(facts.size)), rewards=rewards, reason=None, num_dropped=0)

    return keep


def overlong_filter() -> GroupFilter:
    """Leaves truncated rollouts out, and drops a group of which fewer than two are left.

    Source: Yu et al., "DAPO", 2025, section 3.4, overlong filtering, which masks their loss: here they do not
    count in the group's mean and standard deviation either.
    """

    def keep(facts: GroupFacts, rng: np.random.Generator) -> Filtered:
        kept = [index for index, is_truncated in enumerate(facts.is_truncated) if not is_truncated]
        return _dropped(facts, FilterReason.OVERLONG) if len(kept) < 2 else _kept(facts, kept)

    return keep


def resample_on_correct(
    num_kept: int, *, min_positive_reward: float = 0.5, smoothing: float = 0.1
) -> GroupFilter:
    """Keeps ``num_kept`` rollouts of an oversampled group, of the correct ones rather those without faults.

    A rollout is positive where its reward is at least ``min_positive_reward``. Positives and negatives are
    kept in proportion: of P positives in a group of G, P * num_kept / G, rounded to nearest (halves up), and
    the rest are negatives; where both are there at least one of each is kept. Negatives are drawn uniformly,
    to preserve the ways of failing. Positives are drawn one after the other without replacement, each time
    with probabilities proportional to 1 / (penalty + smoothing): towards ``smoothing`` 0 those without
    penalty come first, and with equal penalties the draw is uniform. A group of at most ``num_kept`` stays
    as it is.

    Source: Shang et al., "rStar2-Agent", 2025, GRPO-RoC, which samples twice the group and keeps half of the
    positives and half of the negatives. There a penalty is the share of failed tool calls plus one for a
    malformed answer; smoothing, the rounding and the minimum of one are ours.

    Raises:
        ValueError: ``num_kept`` is below 2 or ``smoothing`` is not above 0.
    """
    if num_kept < 2:
        raise ValueError(f"resample_on_correct: num_kept = {num_kept}; must be at least 2")
    if smoothing <= 0.0:
        raise ValueError(f"resample_on_correct: smoothing = {smoothing}; must be above 0")

    def keep(facts: GroupFacts, rng: np.random.Generator) -> Filtered:
        if facts.size <= num_kept:
            return _kept(facts, range(facts.size))
        penalties = np.zeros(facts.size) if facts.penalties is None else np.asarray(facts.penalties)
        is_positive = np.asarray(facts.rewards) >= min_positive_reward
        positives, negatives = np.flatnonzero(is_positive), np.flatnonzero(~is_positive)
        num_positives = _num_positives_kept(len(positives), facts.size, num_kept)
        weights = 1.0 / (penalties[positives] + smoothing)
        kept_positives = _draw(positives, weights, num_positives, rng)
        kept_negatives = _draw(negatives, np.ones(len(negatives)), num_kept - num_positives, rng)
        return _kept(facts, sorted([*kept_positives, *kept_negatives]))

    return keep


def _num_positives_kept(num_positives: int, size: int, num_kept: int) -> int:
    rounded = (2 * num_positives * num_kept + size) // (2 * size)
    return min(max(rounded, min(num_positives, 1)), num_kept - min(size - num_positives, 1))


def _draw(indices: np.ndarray, weights: np.ndarray, num: int, rng: np.random.Generator) -> list[int]:
    """``num`` of ``indices``, one after the other without replacement, in proportion to ``weights``.

    Source: Efraimidis and Spirakis, "Weighted Random Sampling with a Reservoir", 2006: those that come first
    of exponential waiting times whose rates are the weights.
    """
    waiting = rng.exponential(size=len(indices)) / weights
    return [int(index) for index in indices[np.argsort(waiting)[:num]]]


def chain(*filters: GroupFilter) -> GroupFilter:
    """One filter after the other, each on what is left; the first that drops the group gives the reason.

    Indices are those of the original group. Without filters everything is kept.
    """

    def keep(facts: GroupFacts, rng: np.random.Generator) -> Filtered:
        kept, left = tuple(range(facts.size)), facts
        for one in filters:
            filtered = one(left, rng)
            if filtered.reason is not None:
                return _dropped(facts, filtered.reason)
            kept = tuple(kept[index] for index in filtered.kept)
            left = left.take(filtered.kept, filtered.rewards)
        return Filtered(kept=kept, rewards=left.rewards, reason=None, num_dropped=facts.size - len(kept))

    return keep
