"""Filters: rules that choose which rollouts of a scored group train, and with which rewards.

A filter gets the facts of one group and returns the rollouts that it keeps. Filters are pure: their only
source of randomness is the generator that they get. ``apply_filters`` applies several in order, and the order
matters: after a penalty, a filter that compares rewards compares the penalized ones.
"""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from forgeasync.algorithms.own_results import Filtered, FilterReason, GroupFacts, check_filtered
from forgeasync.schema import MAX_COUNT, OWN_INSTANCE, Count, Factor, PythonCode, Section, build_code

if TYPE_CHECKING:
    import numpy as np


class Filter(Section):
    """Base class of filters, which choose the rollouts of a scored group that train.

    To define your own filter, write a class like those below:

        import forgeasync as fa


        class KeepShort(fa.Filter):
            '''Leaves out the responses that are longer than a limit.'''

            max_length: int = 1000

            def __call__(self, facts, rng):
                return facts.keep([i for i, length in enumerate(facts.lengths) if length <= self.max_length])

    To use it, set ``filters: [{kind: python, factory: my_filters.KeepShort, options: {max_length: 500}}]``. A
    function of ``facts`` and ``rng``, or a function that returns one, works as well. Draw random numbers from
    ``rng`` only, so that a resumed run makes the same draws.
    """

    @abstractmethod
    def __call__(self, facts: GroupFacts, rng: np.random.Generator) -> Filtered:
        """Choose the rollouts of a group that train.

        Args:
            facts: Rewards, lengths and other facts of each rollout.
            rng: Random numbers of this group, the same in a resumed run.

        Returns:
            The result of ``GroupFacts.keep`` or ``GroupFacts.drop``.
        """


class DynamicSampling(Filter):
    """Drops groups without a learning signal: those with equal or, with ``min_std``, nearly equal rewards.

    Source: Yu et al., "DAPO", 2025, equation 11, which requires that some but not all rollouts are correct
    (binary rewards). ``min_std`` is our addition.
    """

    kind: Literal["dynamic_sampling"] = "dynamic_sampling"
    min_std: float = Field(default=0.0, ge=0.0, le=1e30)
    """Unbiased standard deviation of a group's rewards below which the group is dropped too."""

    def __call__(self, facts: GroupFacts, rng: np.random.Generator) -> Filtered:
        if len(set(facts.rewards)) == 1:
            return facts.drop(FilterReason.ALL_EQUAL)
        if statistics.stdev(facts.rewards) < self.min_std:
            return facts.drop(FilterReason.LOW_SPREAD)
        return facts.keep(range(facts.size))


class OverlongPenalty(Filter):
    """Lowers the rewards of long responses by up to 1, and keeps all of them (soft overlong punishment).

    The reward of a response of n tokens does not change up to n = max_length - buffer. Beyond,
    it changes by (max_length - buffer - n) / buffer, and by -1 above max_length. Source: Yu et al., "DAPO",
    2025, equation 13.
    """

    kind: Literal["overlong_penalty"] = "overlong_penalty"
    max_length: Count
    """Response length in tokens from which the full penalty of 1 applies."""
    buffer_share: float = Field(default=0.2, gt=0.0, le=1.0)
    """Last part of ``max_length``, as a share, in which the penalty grows from 0. DAPO: 4,096 of 20,480."""

    @property
    def buffer(self) -> int:
        """Number of tokens before ``max_length`` over which the penalty grows."""
        return max(1, round(self.max_length * self.buffer_share))

    def __call__(self, facts: GroupFacts, rng: np.random.Generator) -> Filtered:
        start = self.max_length - self.buffer
        rewards = tuple(
            reward - min(max((length - start) / self.buffer, 0.0), 1.0)
            for reward, length in zip(facts.rewards, facts.lengths, strict=True)
        )
        return facts.keep(range(facts.size), rewards)


class OverlongFilter(Filter):
    """Leaves out truncated rollouts, and drops a group if fewer than two rollouts remain.

    Source: Yu et al., "DAPO", 2025, section 3.4, overlong filtering, which masks the loss of truncated
    rollouts. This filter also excludes them from the group's mean and standard deviation.
    """

    kind: Literal["overlong_filter"] = "overlong_filter"

    def __call__(self, facts: GroupFacts, rng: np.random.Generator) -> Filtered:
        kept = [index for index, is_truncated in enumerate(facts.is_truncated) if not is_truncated]
        return facts.drop(FilterReason.OVERLONG) if len(kept) < 2 else facts.keep(kept)


class ResampleOnCorrect(Filter):
    """Keeps ``num_kept`` rollouts of an oversampled group, preferring correct ones with few penalties.

    A rollout is positive if its reward is at least ``min_positive_reward``. Positives and negatives are kept
    in proportion: of P positives in a group of G, P * num_kept / G are kept, rounded to nearest (halves up),
    and the rest are negatives. If the group has both, at least one of each is kept. Negatives are drawn
    uniformly, to preserve the variety of failures. Positives are drawn successively without replacement, with
    probabilities proportional to 1 / (penalty + smoothing): as ``smoothing`` approaches 0, rollouts without
    penalty come first; with equal penalties, the draw is uniform. A group of at most ``num_kept`` rollouts
    stays unchanged. A rollout's penalty is the sum of its score's ``penalties``.

    Source: Shang et al., "rStar2-Agent", 2025, GRPO-RoC, which samples twice the group and keeps half of the
    positives and half of the negatives. There a penalty is the share of failed tool calls plus one for a
    malformed answer. Smoothing, the rounding and the minimum of one are our additions.
    """

    kind: Literal["resample_on_correct"] = "resample_on_correct"
    num_kept: int = Field(ge=2, le=MAX_COUNT)
    """Number of rollouts to keep of each group; ``algorithm.group_size`` is usually twice as large."""
    min_positive_reward: float = Field(default=0.5, ge=-1e30, le=1e30)
    """Minimum reward of a correct rollout."""
    smoothing: Factor = 0.1
    """Added to penalties: correct rollouts are drawn in proportion to 1 / (penalty + smoothing)."""

    def __call__(self, facts: GroupFacts, rng: np.random.Generator) -> Filtered:
        # Imported here because reading a config must not need numpy.
        import numpy as np

        if facts.size <= self.num_kept:
            return facts.keep(range(facts.size))
        penalties = np.zeros(facts.size) if facts.penalties is None else np.asarray(facts.penalties)
        is_positive = np.asarray(facts.rewards) >= self.min_positive_reward
        positives, negatives = np.flatnonzero(is_positive), np.flatnonzero(~is_positive)
        num_positives = _num_positives_kept(len(positives), facts.size, self.num_kept)
        weights = 1.0 / (penalties[positives] + self.smoothing)
        kept_positives = _draw(positives, weights, num_positives, rng)
        kept_negatives = _draw(negatives, np.ones(len(negatives)), self.num_kept - num_positives, rng)
        return facts.keep(sorted([*kept_positives, *kept_negatives]))


def _num_positives_kept(num_positives: int, size: int, num_kept: int) -> int:
    rounded = (2 * num_positives * num_kept + size) // (2 * size)
    return min(max(rounded, min(num_positives, 1)), num_kept - min(size - num_positives, 1))


def _draw(indices: np.ndarray, weights: np.ndarray, num: int, rng: np.random.Generator) -> list[int]:
    """Draw ``num`` of ``indices`` successively without replacement, in proportion to ``weights``.

    Draws an exponential waiting time with the weight as its rate for each index, and takes the shortest ones.
    Source: Efraimidis and Spirakis, "Weighted Random Sampling with a Reservoir", 2006.
    """
    import numpy as np

    waiting = rng.exponential(size=len(indices)) / weights
    return [int(index) for index in indices[np.argsort(waiting)[:num]]]


class PythonFilter(PythonCode, Filter):
    """Your own filter, ``(facts: GroupFacts, rng) -> Filtered``. ``Filter`` has an example.

    A call raises ValueError if your code returns anything else.
    """

    def __call__(self, facts: GroupFacts, rng: np.random.Generator) -> Filtered:
        return check_filtered(build_code(self, ("facts", "rng"))(facts, rng), facts=facts)


AnyFilter = Annotated[
    DynamicSampling | OverlongPenalty | OverlongFilter | ResampleOnCorrect | PythonFilter,
    Field(discriminator="kind"),
    OWN_INSTANCE,
]
"""Entry of ``algorithm.filters`` of a config: one of the filters above, or your own."""


def apply_filters(filters: Sequence[Filter], facts: GroupFacts, rng: np.random.Generator) -> Filtered:
    """Apply filters in order, each to the rollouts that the one before kept.

    If a filter drops the whole group, the result has its reason. Indices in the result are those of the
    original group. Without filters, all rollouts are kept.
    """
    kept, left = tuple(range(facts.size)), facts
    for one in filters:
        filtered = one(left, rng)
        if filtered.reason is not None:
            return facts.drop(filtered.reason)
        kept = tuple(kept[index] for index in filtered.kept)
        left = left.take(filtered.kept, filtered.rewards)
    return facts.keep(kept, left.rewards)
