"""What group filters know of a scored group, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FilterReason(StrEnum):
    """Why a whole group is dropped."""

    ALL_EQUAL = "all_equal"
    """All rewards are equal: no advantage differs from 0."""
    LOW_SPREAD = "low_spread"
    """The rewards' standard deviation is below a threshold."""
    OVERLONG = "overlong"
    """Fewer than two rollouts were not truncated."""
    NONE_KEPT = "none_kept"
    """A filter of the user's own kept no rollout."""


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

    def keep(self, kept: Sequence[int], rewards: Sequence[float] | None = None) -> Filtered:
        """These rollouts are kept, with these rewards; without rewards, those that they have.

        None of them left: the group is dropped for ``FilterReason.NONE_KEPT``.
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
        """The whole group is dropped."""
        return Filtered(kept=(), rewards=(), reason=reason, num_dropped=self.size)

    def take(self, kept: Sequence[int], rewards: tuple[float, ...]) -> GroupFacts:
        """The facts of the rollouts at these indices, with other rewards."""
        return GroupFacts(
            rewards=rewards,
            lengths=tuple(self.lengths[index] for index in kept),
            is_truncated=tuple(self.is_truncated[index] for index in kept),
            penalties=None if self.penalties is None else tuple(self.penalties[index] for index in kept),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """What is left of a group. Raises ValueError where its parts contradict each other."""

    kept: tuple[int, ...]
    """Indices of the rollouts to train on, increasing; empty: the whole group is dropped."""
    rewards: tuple[float, ...]
    """Of the kept rollouts."""
    reason: FilterReason | None
    """Why the whole group is dropped; None where any of it is kept."""
    num_dropped: int
    """Rollouts left out; all of them where the group is dropped."""

    def __post_init__(self) -> None:
        if len(self.kept) != len(self.rewards):
            raise ValueError(
                f"{len(self.rewards)} rewards for {len(self.kept)} kept rollouts; must be one each"
            )
        if (self.reason is None) != (len(self.kept) > 0):
            raise ValueError(f"{len(self.kept)} rollouts are kept, with the reason to drop {self.reason}")
