"""Input and result of group filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FilterReason(StrEnum):
    """Reason why filters drop a whole group."""

    ALL_EQUAL = "all_equal"
    """All rewards are equal, so all advantages are 0."""
    LOW_SPREAD = "low_spread"
    """The standard deviation of the rewards is below a threshold."""
    OVERLONG = "overlong"
    """Fewer than two rollouts were not truncated."""
    NONE_KEPT = "none_kept"
    """A user-defined filter kept no rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Facts about a scored group, the input of filters. Each tuple has one entry for each rollout."""

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Number of response tokens of each rollout."""
    is_truncated: tuple[bool, ...]
    """Whether each rollout was cut at its maximum length."""
    penalties: tuple[float, ...] | None = None
    """Penalties of each rollout outside the reward, at least 0, such as the share of failed tool calls.

    None means 0 for all.
    """

    def __post_init__(self) -> None:
        num = len(self.rewards)
        assert num > 0 and len(self.lengths) == len(self.is_truncated) == num
        assert self.penalties is None or (len(self.penalties) == num and min(self.penalties) >= 0.0)

    @property
    def size(self) -> int:
        """Number of rollouts in the group."""
        return len(self.rewards)

    def keep(self, kept: Sequence[int], rewards: Sequence[float] | None = None) -> Filtered:
        """Return the decision to keep the rollouts at the indices ``kept``.

        They train with ``rewards``, or with their present rewards if it is None. If ``kept`` is empty, the
        decision is to drop the group for ``FilterReason.NONE_KEPT``.
        """
        if len(kept) == 0:
            return self.drop(FilterReason.NONE_KEPT)
        return Filtered(
            kept=tuple(kept),
            rewards=tuple([self.rewards[index] for index in kept] if rewards is None else rewards),
            reason=None,
            num_dropped=self.size - len(kept),
        )

    def drop(self, reason: FilterReason) -> Filtered:
        """Return the decision to drop the whole group."""
        return Filtered(kept=(), rewards=(), reason=reason, num_dropped=self.size)

    def take(self, kept: Sequence[int], rewards: tuple[float, ...]) -> GroupFacts:
        """Return the facts of the rollouts at these indices, with other rewards."""
        return GroupFacts(
            rewards=rewards,
            lengths=tuple(self.lengths[index] for index in kept),
            is_truncated=tuple(self.is_truncated[index] for index in kept),
            penalties=None if self.penalties is None else tuple(self.penalties[index] for index in kept),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """Decision of a filter about a group.

    Raises:
        ValueError: The fields contradict each other.
    """

    kept: tuple[int, ...]
    """Indices of the rollouts to train on, increasing; empty if the whole group is dropped."""
    rewards: tuple[float, ...]
    """Rewards of the kept rollouts."""
    reason: FilterReason | None
    """Reason why the whole group is dropped; None if any rollout is kept."""
    num_dropped: int
    """Number of rollouts left out, all of them if the group is dropped."""

    def __post_init__(self) -> None:
        if len(self.kept) != len(self.rewards):
            raise ValueError(
                f"{len(self.rewards)} rewards for {len(self.kept)} kept rollouts; must be one each"
            )
        if (self.reason is None) != (len(self.kept) > 0):
            raise ValueError(
                f"{len(self.kept)} rollouts are kept, and the reason to drop the group is {self.reason}; a "
                "reason must be given exactly if none is kept"
            )
