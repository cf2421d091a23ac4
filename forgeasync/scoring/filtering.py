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
        self._max_in_a_row = algorithm.max_filtered_in_a_row
        self._in_a_row: list[tuple[FilterReason, float]] = []
        """Reason and mean reward of each group dropped since one was kept."""
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
            self._in_a_row.clear()
            return filtered
        self._num_groups[filtered.reason] += 1
        self._in_a_row.append((filtered.reason, float(np.mean(facts.rewards))))
        if len(self._in_a_row) >= self._max_in_a_row:
            raise AllFiltered(all_dropped(self._in_a_row))
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


def all_dropped(groups: Sequence[tuple[FilterReason, float]]) -> str:
    """Return a message for the user; ``groups`` are the reasons and mean rewards of the dropped groups."""
    num, by_reason = len(groups), Counter(reason for reason, _ in groups).most_common()
    reasons = ", ".join(f"{count} {reason}" for reason, count in by_reason)
    return (
        f"filters dropped {num} groups in a row ({reasons}; limit {num}), of mean reward "
        f"{math.fsum(mean for _, mean in groups) / num:.3f}: nothing is left to train on. "
        + " ".join(_ADVICE[reason] for reason, _ in by_reason)
    )


_ADVICE = {
    FilterReason.ALL_EQUAL: "all_equal: near the lowest reward the problems are too hard for the model, near "
    "the highest too easy; take others, a larger algorithm.group_size, or leave dynamic_sampling out.",
    FilterReason.LOW_SPREAD: "low_spread: lower min_std of dynamic_sampling.",
    FilterReason.OVERLONG: "overlong: nearly all responses are cut; raise sampling.max_response_tokens or "
    "leave overlong_filter out.",
    FilterReason.NONE_KEPT: "none_kept: a filter of your own keeps no rollout of these groups.",
}
