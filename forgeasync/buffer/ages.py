"""Computes how old a group is: the version that its age counts from.

A group whose reference version is r may be trained on up to optimizer step r + max_off_policy_steps, its
deadline. While it is sampled only a lower bound of r is known; it rises and never falls.
"""

from collections.abc import Iterable, Sequence

from forgeasync.config import AgeOf
from forgeasync.rollouts import GroupProgress, StoredRollout, VersionSpan


def reference_version(rollouts: Sequence[StoredRollout], age_of: AgeOf) -> int:
    """The version that a finished group's age counts from."""
    match age_of:
        case AgeOf.OLDEST_TOKEN:
            return min(rollout.first_version for rollout in rollouts)
        case AgeOf.NEWEST_TOKEN:
            return min(rollout.last_version for rollout in rollouts)
        case AgeOf.MEAN:
            return min(_floor_of_mean(rollout.version_spans) for rollout in rollouts)
        case AgeOf.TOKEN:
            return max(rollout.last_version for rollout in rollouts)


def known_reference(progress: GroupProgress, group_size: int, age_of: AgeOf) -> int:
    """A lower bound of the reference of a group under way; 0 where its progress says nothing of it."""
    all_run = progress.num_running == group_size
    if all_run and progress.num_tokens == 0:
        return progress.version
    match age_of:
        case AgeOf.NEWEST_TOKEN if all_run:
            return progress.version
        case AgeOf.TOKEN if progress.num_running:
            return progress.version
        case _:
            return 0


def _floor_of_mean(spans: Sequence[VersionSpan]) -> int:
    # Tokens that were not sampled lie between spans and have no age.
    num_tokens = sum(span.end - span.start for span in spans)
    return sum(span.version * (span.end - span.start) for span in spans) // num_tokens


class Deadlines:
    """Ids of groups by the last optimizer step that may train on them."""

    def __init__(self) -> None:
        self._ids: dict[int, set[int]] = {}

    def add(self, group_id: int, deadline: int) -> None:
        self._ids.setdefault(deadline, set()).add(group_id)

    def remove(self, group_id: int, deadline: int) -> None:
        self._ids[deadline].remove(group_id)
        if not self._ids[deadline]:
            del self._ids[deadline]

    def before(self, step: int) -> list[tuple[int, list[int]]]:
        """Deadlines earlier than ``step`` with their groups, as they are now."""
        return [(deadline, sorted(self._ids[deadline])) for deadline in self._ids if deadline < step]

    def are_feasible(self, step: int, taken: Iterable[tuple[int, int]], *, groups_per_step: int) -> bool:
        """Whether all groups but those taken now, in ``step``, can train in later steps by their deadlines.

        ``taken`` holds deadlines, each with the number of its groups that are taken.
        """
        num_taken = dict(taken)
        num_due = 0
        for deadline in sorted(self._ids):
            num_due += len(self._ids[deadline]) - num_taken.get(deadline, 0)
            if num_due > (deadline - step) * groups_per_step:
                return False
        return True
