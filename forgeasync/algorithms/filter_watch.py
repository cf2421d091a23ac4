"""Notices that a run starves because its filters drop every group."""

from collections import Counter

from forgeasync.algorithms.group_facts import FilterReason


class FilterWatch:
    """Counts the groups that were dropped since the last one that was kept."""

    def __init__(self, limit: int) -> None:
        """``limit`` dropped groups in a row are too many. Raises ValueError where it is not above 0."""
        if limit <= 0:
            raise ValueError(f"FilterWatch: limit = {limit}; must be above 0")
        self._limit = limit
        self._by_reason: Counter[FilterReason] = Counter()
        self._summed_reward = 0.0

    def kept(self) -> None:
        """A group, or part of it, was kept."""
        self._by_reason.clear()
        self._summed_reward = 0.0

    def dropped(self, reason: FilterReason, mean_reward: float) -> None:
        """A whole group was dropped; ``mean_reward`` is that of its rollouts as they were scored."""
        self._by_reason[reason] += 1
        self._summed_reward += mean_reward

    def check(self) -> str | None:
        """What to tell the user once the limit is reached, before that None."""
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
}
