"""Reference versions and deadlines of groups, and the order in which batches take complete groups.

The age of a group counts from its reference version r. Its deadline is r + max_off_policy_steps, the last
optimizer step that may train on it. During sampling only a lower bound of r is known, which never falls.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from forgeasync.config import AgeOf, BatchOrder
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


class ReadyGroups(Protocol):
    """Ordered collection of the ids of groups that a batch may take. ``add`` and ``pop`` cost O(log n)."""

    def __len__(self) -> int: ...

    def add(self, group_id: int, deadline: int) -> None: ...

    def remove(self, group_id: int, deadline: int) -> None: ...

    def pop(self, num_groups: int) -> list[int]:
        """Remove and return the first ``num_groups``, which must exist."""
        ...


class EarliestDeadlineFirst:
    """Orders groups by deadline, then by the order in which they started."""

    def __init__(self) -> None:
        # By deadline. At most max_off_policy_steps + 1 deadlines exist at a time. Removed ids stay in the
        # heaps until they are popped.
        self._heaps: dict[int, list[int]] = {}
        self._ids: dict[int, set[int]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, group_id: int, deadline: int) -> None:
        """Add a complete group with its deadline, a policy version."""
        heapq.heappush(self._heaps.setdefault(deadline, []), group_id)
        self._ids.setdefault(deadline, set()).add(group_id)
        self._num += 1

    def remove(self, group_id: int, deadline: int) -> None:
        """Remove a group that was added with this deadline."""
        self._ids[deadline].remove(group_id)
        self._num -= 1
        if not self._ids[deadline]:
            del self._ids[deadline], self._heaps[deadline]

    def num_taken_by_deadline(self, num_groups: int) -> Iterator[tuple[int, int]]:
        """Yield (deadline, number of groups) of the groups that ``pop`` would take, by deadline."""
        for deadline in sorted(self._ids):
            num_taken = min(num_groups, len(self._ids[deadline]))
            num_groups -= num_taken
            yield deadline, num_taken
            if not num_groups:
                return

    def pop(self, num_groups: int) -> list[int]:
        """Remove ``num_groups`` groups, those with the earliest deadlines first, and return their ids."""
        taken: list[int] = []
        while len(taken) < num_groups:
            deadline = min(self._ids)
            group_id = heapq.heappop(self._heaps[deadline])
            if group_id in self._ids[deadline]:
                self.remove(group_id, deadline)
                taken.append(group_id)
        return taken


class FirstCompleteFirst:
    """Orders groups by the order of the calls of ``add``."""

    def __init__(self) -> None:
        # Not a plain dict: finding its first entry gets slower with each entry removed before it.
        self._ids: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, group_id: int, deadline: int) -> None:
        self._ids[group_id] = None

    def remove(self, group_id: int, deadline: int) -> None:
        del self._ids[group_id]

    def pop(self, num_groups: int) -> list[int]:
        return [self._ids.popitem(last=False)[0] for _ in range(num_groups)]


class StartWindow:
    """Window of the oldest ``size`` groups in the buffer, or of all groups if ``size`` is None.

    Operations cost amortized O(1).
    """

    def __init__(self, size: int | None) -> None:
        self._size = size
        self._inside: set[int] = set()
        self._outside: OrderedDict[int, None] = OrderedDict()

    def start(self, group_id: int) -> None:
        """Add a group that is younger than all others."""
        self._outside[group_id] = None
        self._fill()

    def end(self, group_ids: Iterable[int]) -> list[int]:
        """Remove groups, if they are present, and return the groups that enter the window."""
        for group_id in group_ids:
            self._inside.discard(group_id)
            self._outside.pop(group_id, None)
        return self._fill()

    def come_back(self, group_id: int) -> None:
        """Put a removed group back into the window, which may then exceed its size.

        The group belongs there, because it is older than others in the window.
        """
        self._inside.add(group_id)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._inside

    def _fill(self) -> list[int]:
        entered = []
        while self._outside and (self._size is None or len(self._inside) < self._size):
            group_id, _ = self._outside.popitem(last=False)
            self._inside.add(group_id)
            entered.append(group_id)
        return entered


class BatchLine:
    """Groups in the buffer. Those that are complete and in the window are ready, in batch order."""

    def __init__(self, order: BatchOrder, window_groups: int | None) -> None:
        """Create an empty line. ``window_groups`` is the size of the window; None means no limit."""
        is_by_deadline = order is BatchOrder.DEADLINE
        self._ready: ReadyGroups = EarliestDeadlineFirst() if is_by_deadline else FirstCompleteFirst()
        self._window = StartWindow(window_groups)
        self._deadlines: dict[int, int] = {}
        """Deadline of each complete group."""

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def start(self, group_id: int) -> None:
        """Add a group that is younger than all others."""
        self._window.start(group_id)

    def come_back(self, group_id: int) -> None:
        """Put a removed group back."""
        self._window.come_back(group_id)

    def complete(self, group_id: int, deadline: int) -> None:
        """Mark a group as complete, with its deadline."""
        self._deadlines[group_id] = deadline
        if group_id in self._window:
            self._ready.add(group_id, deadline)

    def end(self, group_ids: Iterable[int]) -> None:
        """Remove groups, if they are present. Younger groups move into the window."""
        group_ids = tuple(group_ids)
        for group_id in group_ids:
            deadline = self._deadlines.pop(group_id, None)
            if deadline is not None and group_id in self._window:
                self._ready.remove(group_id, deadline)
        for entered in self._window.end(group_ids):
            if entered in self._deadlines:
                self._ready.add(entered, self._deadlines[entered])

    def num_taken_by_deadline(self, num_groups: int) -> Iterator[tuple[int, int]]:
        """Yield (deadline, number of groups) of the groups that ``pop`` would take, by deadline."""
        assert isinstance(self._ready, EarliestDeadlineFirst), (
            "the proof of the age bound is about this order"
        )
        return self._ready.num_taken_by_deadline(num_groups)

    def pop(self, num_groups: int) -> list[int]:
        """Remove and return the first ``num_groups`` ready groups."""
        group_ids = self._ready.pop(num_groups)
        for group_id in group_ids:
            del self._deadlines[group_id]
        self.end(group_ids)
        return group_ids
