"""Scored groups on their way to the buffer: what group filters leave of them, counted."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from forgeasync.algorithms.filter_watch import FilterWatch
from forgeasync.algorithms.filters import apply_filters
from forgeasync.algorithms.group_facts import Filtered, FilterReason, GroupFacts
from forgeasync.config.algorithm import AlgorithmSection
from forgeasync.data.rollout import FinishReason, Group
from forgeasync.scoring.score import Score


class AllFiltered(RuntimeError):
    """Group filters drop everything: the run would never make another step."""


class GroupFiltering:
    """The filters of a run. What they draw follows from the seed and the group's draw id."""

    def __init__(self, algorithm: AlgorithmSection, *, seed: int) -> None:
        self._filters = algorithm.filters
        self._watch = FilterWatch(algorithm.max_filtered_in_a_row)
        self._seed = seed
        self._num_groups: Counter[FilterReason] = Counter({reason: 0 for reason in FilterReason})
        self._num_rollouts = 0

    def apply(self, group: Group, scores: Sequence[Score]) -> Filtered:
        """What of a scored group trains; ``scores`` has one for each rollout.

        Raises:
            AllFiltered: ``algorithm.max_filtered_in_a_row`` groups in a row had nothing left.
        """
        facts = GroupFacts(
            rewards=tuple(score.value for score in scores),
            lengths=tuple(rollout.num_sampled_tokens for rollout in group.rollouts),
            is_truncated=tuple(rollout.finish_reason is FinishReason.LENGTH for rollout in group.rollouts),
            penalties=tuple(math.fsum(score.penalties.values()) for score in scores),
        )
        filtered = apply_filters(self._filters, facts, np.random.default_rng([self._seed, group.draw_id]))
        self._num_rollouts += filtered.num_dropped
        if filtered.reason is None:
            self._watch.kept()
            return filtered
        self._num_groups[filtered.reason] += 1
        self._watch.dropped(filtered.reason, float(np.mean(facts.rewards)))
        if (problem := self._watch.check()) is not None:
            raise AllFiltered(problem)
        return filtered

    def metrics(self) -> dict[str, float]:
        """Counts since the run began, under their names in metrics.jsonl."""
        return {f"filtered/num_groups_{reason}": count for reason, count in self._num_groups.items()} | {
            "filtered/num_rollouts": self._num_rollouts
        }
