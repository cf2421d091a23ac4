"""Complete groups in the order in which batches take them. Adding and taking one costs O(log n)."""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from forgeasync.config import BatchOrder


class ReadyGroups(Protocol):
    """Group ids that a batch may take."""

    def __len__(self) -> int: ...

    def add(self, group_id: int, deadline: int) -> None: ...

    def remove(self, group_id: int, deadline: int) -> None: ...

    def pop(self, num_groups: int) -> list[int]:
        """Take that many, the first first."""
        ...


class EarliestDeadlineFirst:
    """Groups by deadline; among equal deadlines, the group that started first."""

    def __init__(self) -> None:
        # Deadlines are versions, at most max_off_policy_steps + 1 different ones at a time. Removed ids
        # stay in the heaps until they come up.
        self._heaps: dict[int, list[int]] = {}
        self._ids: dict[int, set[int]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, group_id: int, deadline: int) -> None:
        heapq.heappush(self._heaps.setdefault(deadline, []), group_id)
        self._ids.setdefault(deadline, set()).add(group_id)
        self._num += 1

    def remove(self, group_id: int, deadline: int) -> None:
        self._ids[deadline].remove(group_id)
        self._num -= 1
        if not self._ids[deadline]:
            del self._ids[deadline], self._heaps[deadline]

    def num_taken_by_deadline(self, num_groups: int) -> Iterator[tuple[int, int]]:
        """(deadline, number of groups) of what ``pop`` would take, deadlines ascending."""
        for deadline in sorted(self._ids):
            num_taken = min(num_groups, len(self._ids[deadline]))
            num_groups -= num_taken
            yield deadline, num_taken
            if not num_groups:
                return

    def pop(self, num_groups: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < num_groups:
            deadline = min(self._ids)
            group_id = heapq.heappop(self._heaps[deadline])
            if group_id in self._ids[deadline]:
                self.remove(group_id, deadline)
                taken.append(group_id)
        return taken


class FirstCompleteFirst:
    """In the order of ``add``."""

    def __init__(self) -> None:
        # A plain dict takes longer to its first entry the more were removed before it.
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
    """The oldest ``size`` groups under way; None: all of them. Every operation costs O(1), amortized."""

    def __init__(self, size: int | None) -> None:
        self._size = size
        self._inside: set[int] = set()
        self._outside: OrderedDict[int, None] = OrderedDict()

    def start(self, group_id: int) -> None:
        """The youngest group."""
        self._outside[group_id] = None
        self._fill()

    def end(self, group_ids: Iterable[int]) -> list[int]:
        """Groups leave, if they have not left before; those that come inside for it."""
        for group_id in group_ids:
            self._inside.discard(group_id)
            self._outside.pop(group_id, None)
        return self._fill()

    def come_back(self, group_id: int) -> None:
        """A group that had left is under way after all; inside, since it is older than others there."""
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
    """Groups under way: those of them that are complete and in the window are ready, in a batch's order."""

    def __init__(self, order: BatchOrder, window_groups: int | None) -> None:
        """``window_groups`` is the size of the window; None: all groups are inside."""
        is_by_deadline = order is BatchOrder.DEADLINE
        self._ready: ReadyGroups = EarliestDeadlineFirst() if is_by_deadline else FirstCompleteFirst()
        self._window = StartWindow(window_groups)
        self._deadlines: dict[int, int] = {}
        """Of the complete groups."""

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def start(self, group_id: int) -> None:
        """The youngest group."""
        self._window.start(group_id)

    def come_back(self, group_id: int) -> None:
        """A group that had left is under way after all."""
        self._window.come_back(group_id)

    def complete(self, group_id: int, deadline: int) -> None:
        """A group can be trained on, up to a step."""
        self._deadlines[group_id] = deadline
        if group_id in self._window:
            self._ready.add(group_id, deadline)

    def end(self, group_ids: Iterable[int]) -> None:
        """Groups leave, if they have not left before; others come inside for it."""
        group_ids = tuple(group_ids)
        for group_id in group_ids:
            deadline = self._deadlines.pop(group_id, None)
            if deadline is not None and group_id in self._window:
                self._ready.remove(group_id, deadline)
        for entered in self._window.end(group_ids):
            if entered in self._deadlines:
                self._ready.add(entered, self._deadlines[entered])

    def num_taken_by_deadline(self, num_groups: int) -> Iterator[tuple[int, int]]:
        """(deadline, number of groups) of what ``pop`` would take, deadlines ascending."""
        assert isinstance(self._ready, EarliestDeadlineFirst), "what the proof of the age bound is about"
        return self._ready.num_taken_by_deadline(num_groups)

    def pop(self, num_groups: int) -> list[int]:
        """Take that many, the first first: they leave."""
        group_ids = self._ready.pop(num_groups)
        for group_id in group_ids:
            del self._deadlines[group_id]
        self.end(group_ids)
        return group_ids
