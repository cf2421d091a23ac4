"""Applies group filters to scored groups before the buffer, and counts what they drop."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from forgeasync.algorithms import Filtered, FilterReason, GroupFacts, apply_filters
from forgeasync.config import AlgorithmSection
from forgeasync.rollouts import FinishReason, Group, Score


class AllFiltered(RuntimeError):
    """Group filters drop everything, so the run would never make another step."""


class GroupFiltering:
    """Filters of a run. Their random draws are determined by the seed and the group's draw id."""

    def __init__(self, algorithm: AlgorithmSection, *, seed: int) -> None:
        self._filters = algorithm.filters
        self._watch = FilterMonitor(algorithm.max_filtered_in_a_row)
        self._seed = seed
        self._num_groups: Counter[FilterReason] = Counter({reason: 0 for reason in FilterReason})
        self._num_rollouts = 0

    def apply(self, group: Group, scores: Sequence[Score]) -> Filtered:
        """Filter a scored group; ``scores`` has one score for each rollout.

        Raises:
            AllFiltered: All of ``algorithm.max_filtered_in_a_row`` consecutive groups were dropped.
        """
        facts = GroupFacts(
            rewards=tuple(score.value for score in scores),
            lengths=tuple(rollout.num_sampled_tokens for rollout in group.rollouts),
            is_truncated=tuple(rollout.finish_reason is FinishReason.LENGTH for rollout in group.rollouts),
            penalties=tuple(math.fsum(score.penalties.values()) for score in scores),
        )
        filtered = self._apply(facts, [rollout.agent for rollout in group.rollouts], group.draw_id)
        self._num_rollouts += filtered.num_dropped
        if filtered.reason is None:
            self._watch.kept()
            return filtered
        self._num_groups[filtered.reason] += 1
        problem = self._watch.dropped(filtered.reason, float(np.mean(facts.rewards)))
        if problem is not None:
            raise AllFiltered(problem)
        return filtered

    def _apply(self, facts: GroupFacts, agents: Sequence[int], draw_id: int) -> Filtered:
        """Filter the rollouts of each agent separately; a group without remaining rollouts is dropped."""
        kept: dict[int, float] = {}
        reasons: list[FilterReason] = []
        for agent in sorted(set(agents)):
            places = [index for index, of_index in enumerate(agents) if of_index == agent]
            own = facts.take(places, tuple(facts.rewards[index] for index in places))
            # For agent 0 the random numbers do not depend on the number of agents.
            rng = np.random.default_rng([self._seed, draw_id, *([agent] if agent else [])])
            filtered = apply_filters(self._filters, own, rng)
            kept |= {
                places[index]: reward for index, reward in zip(filtered.kept, filtered.rewards, strict=True)
            }
            if filtered.reason is not None:
                reasons.append(filtered.reason)
        if not kept:
            return facts.drop(reasons[0])
        indices = sorted(kept)
        return facts.keep(indices, [kept[index] for index in indices])

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began, by their names in metrics.jsonl."""
        counts: dict[str, float] = {
            f"filtered/num_groups_{reason}": count for reason, count in self._num_groups.items()
        }
        return counts | {"filtered/num_rollouts": self._num_rollouts}


class FilterMonitor:
    """Counts consecutive dropped groups."""

    def __init__(self, limit: int) -> None:
        """Set the limit of consecutive dropped groups."""
        self._limit = limit
        self._by_reason: Counter[FilterReason] = Counter()
        self._summed_reward = 0.0

    def kept(self) -> None:
        """Record that a group, or part of it, was kept."""
        self._by_reason.clear()
        self._summed_reward = 0.0

    def dropped(self, reason: FilterReason, mean_reward: float) -> str | None:
        """Record that a whole group was dropped; return a message for the user if the limit is reached.

        ``mean_reward`` is that of its rollouts before filtering.
        """
        self._by_reason[reason] += 1
        self._summed_reward += mean_reward
        num = self._by_reason.total()
        if num < self._limit:
            return None
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._by_reason.most_common())
        advice = " ".join(_ADVICE[reason] for reason, _ in self._by_reason.most_common())
        return (
            f"filters dropped {num} groups in a row ({reasons}; limit {self._limit}), of mean reward "
            f"{self._summed_reward / num:.3f}: nothing is left to train on. {advice}"
        )


_ADVICE = {
    FilterReason.ALL_EQUAL: "all_equal: near the lowest reward the problems are too hard for the model, near "
    "the highest too easy; take others, a larger algorithm.group_size, or leave dynamic_sampling out.",
    FilterReason.LOW_SPREAD: "low_spread: lower min_std of dynamic_sampling.",
    FilterReason.OVERLONG: "overlong: nearly all responses are cut; raise sampling.max_response_tokens or "
    "leave overlong_filter out.",
    FilterReason.NONE_KEPT: "none_kept: a filter of your own keeps no rollout of these groups.",
}
