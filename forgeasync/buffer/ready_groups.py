"""Reference versions and deadlines of groups, and the order in which batches take complete groups.

The age of a group counts from its reference version r. Its deadline is r + max_off_policy_steps, the last
optimizer step that may train on it. During sampling only a lower bound of r is known, which never falls.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from forgeasync.config import AgeOf
from forgeasync.rollouts import GroupProgress, StoredRollout, VersionSpan


def reference_version(rollouts: Sequence[StoredRollout], age_of: AgeOf) -> int:
    """Return the version from which the age of a finished group counts."""
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
    """Return a lower bound of the reference version of a group in flight; 0 if its progress gives none."""
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
    # Tokens between spans were not sampled and have no age.
    num_tokens = sum(span.end - span.start for span in spans)
    return sum(span.version * (span.end - span.start) for span in spans) // num_tokens


class Deadlines:
    """Ids of groups by deadline, with a check whether all deadlines can be met."""

    def __init__(self) -> None:
        self._ids: dict[int, set[int]] = {}

    def add(self, group_id: int, deadline: int) -> None:
        """Add a group with its deadline, a policy version."""
        self._ids.setdefault(deadline, set()).add(group_id)

    def remove(self, group_id: int, deadline: int) -> None:
        """Remove a group that was added with this deadline."""
        self._ids[deadline].remove(group_id)
        if not self._ids[deadline]:
            del self._ids[deadline]

    def before(self, step: int) -> list[tuple[int, list[int]]]:
        """Return the deadlines earlier than ``step``, each with its group ids, as a copy."""
        return [(deadline, sorted(self._ids[deadline])) for deadline in self._ids if deadline < step]

    def are_feasible(self, step: int, taken: Iterable[tuple[int, int]], *, groups_per_step: int) -> bool:
        """Whether all groups that remain after ``step`` can train in later steps by their deadlines.

        ``taken`` holds pairs of a deadline and the number of its groups that ``step`` trains on. Checks that
        the groups due by each deadline fit into the steps up to it.
        """
        num_taken = dict(taken)
        num_due = 0
        for deadline in sorted(self._ids):
            num_due += len(self._ids[deadline]) - num_taken.get(deadline, 0)
            if num_due > (deadline - step) * groups_per_step:
                return False
        return True


class EarliestDeadlineFirst:
    """Complete groups in the order in which batches take them: by deadline, then by start.

    ``add`` and ``pop`` cost O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """Deadlines and ids. Removed groups stay here until they are popped."""
        self._deadlines: dict[int, int] = {}
        self._num_by_deadline: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, group_id: int, deadline: int) -> None:
        """Add a complete group with its deadline, a policy version."""
        heapq.heappush(self._heap, (deadline, group_id))
        self._deadlines[group_id] = deadline
        self._num_by_deadline[deadline] += 1

    def discard(self, group_id: int) -> None:
        """Remove a group, if it is here."""
        if (deadline := self._deadlines.pop(group_id, None)) is not None:
            self._num_by_deadline -= Counter([deadline])

    def num_taken_by_deadline(self, num_groups: int) -> Iterator[tuple[int, int]]:
        """Yield (deadline, number of groups) of the groups that ``pop`` would take, by deadline."""
        for deadline, num_here in sorted(self._num_by_deadline.items()):
            num_taken = min(num_groups, num_here)
            num_groups -= num_taken
            yield deadline, num_taken
            if not num_groups:
                return

    def pop(self, num_groups: int) -> list[int]:
        """Remove the ``num_groups`` groups with the earliest deadlines, and return their ids."""
        taken: list[int] = []
        while len(taken) < num_groups:
            _, group_id = heapq.heappop(self._heap)
            if group_id in self._deadlines:
                self.discard(group_id)
                taken.append(group_id)
        return taken
