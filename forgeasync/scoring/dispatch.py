"""Assigns responses to scorers of the pool and decides what follows each result: a pure state machine.

An item is scored by one call: a response, or all responses of a group for rewards that compare them. It
waits, is assigned to one replica, and ends once: scored, given up or withdrawn.

    waits ──next──► is with a replica ──scored──► ended
      ▲                  │
      └─ failed, lost, ──┘   given up after `max_attempts` failures, `max_lost` losses of its replica, or
         deferred            once its reward was not available for `max_unavailable_s`

Every assignment has a unique number. Only the result of an item's current assignment counts: later results of
a lost replica are discarded, so that no item is scored twice.

An item whose replica was lost may have caused the loss. With every loss, the number of items that may share
its next replica is halved, until it is alone there. This identifies the cause, and items that shared a
replica with it by chance are not given up.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from forgeasync.config import ScorerSection


class DispatchOutcome(StrEnum):
    """Outcome of a result for the assigned item."""

    SCORED = "scored"
    AGAIN = "again"
    """The item waits for another assignment."""
    GIVEN_UP = "given_up"
    DISCARDED = "discarded"
    """The assignment had ended earlier; nothing has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Item to be scored by a replica."""

    number: int
    item: int
    replica: int


@dataclass(slots=True, kw_only=True)
class _Item:
    ready_s: float
    """Earliest time of the next assignment."""
    current: Assignment | None = None
    num_failed: int = 0
    num_lost: int = 0
    deferred_since_s: float | None = None
    """Time since which the item's reward has been unavailable, or None."""


@dataclass(slots=True, kw_only=True)
class _Replica:
    is_up: bool = True
    items: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)
    """Items that were lost before, which limit the number of items of the replica."""


@dataclass(slots=True)
class DispatchCounts:
    """Counts of assignments and items since the dispatcher was created."""

    num_retried: int = 0
    """Assignments after an item's first."""
    num_given_up: int = 0
    num_lost: int = 0
    """Assignments whose replica was lost."""
    num_failed: int = 0
    """Assignments that failed; deferred ones are not included."""
    num_deferred: int = 0
    num_discarded: int = 0
    """Results that did not count."""


class Dispatcher:
    """Distributes items over replicas. Times are in seconds of one clock, which the caller reads."""

    def __init__(self, num_replicas: int, section: ScorerSection, *, retry_wait_s: float) -> None:
        """Start with all replicas up. A failed item waits ``retry_wait_s``; each failure doubles it."""
        self._section = section
        self._retry_wait_s = retry_wait_s
        self._replicas = [_Replica() for _ in range(num_replicas)]
        self._items: dict[int, _Item] = {}
        """Items that have not ended, in order of arrival."""
        self._waiting: dict[int, None] = {}
        """Items without an assignment, in the order in which they are considered."""
        self._next_item = self._next_number = 0
        self.counts = DispatchCounts()

    @property
    def num_waiting(self) -> int:
        """Number of items without an assignment."""
        return len(self._waiting)

    @property
    def num_assigned(self) -> int:
        """Number of items that are assigned to a replica."""
        return len(self._items) - len(self._waiting)

    def submit(self, now_s: float) -> int:
        """Add an item; return its number."""
        item, self._next_item = self._next_item, self._next_item + 1
        self._items[item] = _Item(ready_s=now_s)
        self._waiting[item] = None
        return item

    def next(self, now_s: float) -> Assignment | None:
        """Assign the first ready item to the replica with the fewest items, if one has room."""
        if not self._waiting:
            return None
        # While a suspect waits for a replica with fewer items, younger items must not fill that replica.
        reserved: set[int] = set()
        for number in self._waiting:
            item = self._items[number]
            free = [rank for rank in self._up() if rank not in reserved and self._room(rank) > 0]
            if not free:
                return None
            if item.ready_s > now_s:
                continue
            rank = min(free, key=lambda rank: len(self._replicas[rank].items))
            if len(self._replicas[rank].items) < self._most_beside(item):
                return self._assign(number, rank)
            reserved.add(rank)
        return None

    def next_due_s(self, now_s: float) -> float | None:
        """Return the next time at which a waiting item becomes ready, or None."""
        due = (self._items[item].ready_s for item in self._waiting)
        return min((ready_s for ready_s in due if ready_s > now_s), default=None)

    def scored(self, assignment: Assignment) -> DispatchOutcome:
        """Record that the item has its scores."""
        if not self._is_current(assignment):
            return DispatchOutcome.DISCARDED
        self._end(assignment.item)
        return DispatchOutcome.SCORED

    def failed(self, assignment: Assignment, now_s: float) -> DispatchOutcome:
        """Record that the replica returned no scores, which counts as an attempt."""
        if not self._is_current(assignment):
            return DispatchOutcome.DISCARDED
        self.counts.num_failed += 1
        item = self._items[assignment.item]
        item.num_failed += 1
        item.deferred_since_s = None
        if item.num_failed >= self._section.max_attempts:
            return self._give_up(assignment.item)
        return self._again(assignment.item, now_s + self._retry_wait_s * 2 ** (item.num_failed - 1))

    def deferred(self, assignment: Assignment, now_s: float, retry_after_s: float) -> DispatchOutcome:
        """Record that the item's reward is unavailable, which does not count as an attempt.

        The item is given up after ``scorer.max_unavailable_s``.
        """
        if not self._is_current(assignment):
            return DispatchOutcome.DISCARDED
        self.counts.num_deferred += 1
        item = self._items[assignment.item]
        if item.deferred_since_s is None:
            item.deferred_since_s = now_s
        if now_s - item.deferred_since_s >= self._section.max_unavailable_s:
            return self._give_up(assignment.item)
        return self._again(assignment.item, now_s + retry_after_s)

    def lost(self, assignment: Assignment, now_s: float) -> DispatchOutcome:
        """Record that the replica was lost before it returned a result; does not count as an attempt."""
        if not self._is_current(assignment):
            return DispatchOutcome.DISCARDED
        self.counts.num_lost += 1
        item = self._items[assignment.item]
        item.num_lost += 1
        if item.num_lost >= self._section.max_lost:
            return self._give_up(assignment.item)
        return self._again(assignment.item, now_s)

    def replica_down(self, rank: int, now_s: float) -> tuple[int, ...]:
        """Record that a replica and its assignments are lost; return the items that are given up."""
        replica = self._replicas[rank]
        replica.is_up = False
        given_up = []
        for number in sorted(replica.items, reverse=True):
            assignment = self._items[number].current
            assert assignment is not None
            if self.lost(assignment, now_s) is DispatchOutcome.GIVEN_UP:
                given_up.append(number)
        return tuple(given_up)

    def replica_up(self, rank: int) -> None:
        """Record that a replica is available, or available again."""
        self._replicas[rank].is_up = True

    def withdraw(self, number: int) -> None:
        """Remove an item that is not needed; no effect if it has ended."""
        if number in self._items:
            self._end(number)

    def _up(self) -> Iterator[int]:
        return (rank for rank, replica in enumerate(self._replicas) if replica.is_up)

    def _most_beside(self, item: _Item) -> int:
        """Return the maximum number of items, including this one, for a replica that has this item."""
        return max(1, self._section.max_in_flight >> item.num_lost)

    def _room(self, rank: int) -> int:
        replica = self._replicas[rank]
        if not replica.suspects:
            return self._section.max_in_flight - len(replica.items)
        bounds = (self._most_beside(self._items[number]) for number in replica.suspects)
        return min(bounds) - len(replica.items)

    def _assign(self, number: int, rank: int) -> Assignment:
        item = self._items[number]
        item.current = assignment = Assignment(number=self._next_number, item=number, replica=rank)
        self._next_number += 1
        self._replicas[rank].items.add(number)
        if item.num_lost:
            self._replicas[rank].suspects.add(number)
        del self._waiting[number]
        return assignment

    def _is_current(self, assignment: Assignment) -> bool:
        item = self._items.get(assignment.item)
        if item is not None and item.current == assignment:
            return True
        self.counts.num_discarded += 1
        return False

    def _leave(self, number: int) -> None:
        item = self._items[number]
        if item.current is not None:
            self._replicas[item.current.replica].items.discard(number)
            self._replicas[item.current.replica].suspects.discard(number)
            item.current = None

    def _again(self, number: int, ready_s: float) -> DispatchOutcome:
        self.counts.num_retried += 1
        self._leave(number)
        self._items[number].ready_s = ready_s
        # Before the other waiting items, because it arrived earlier.
        self._waiting = {number: None} | self._waiting
        return DispatchOutcome.AGAIN

    def _give_up(self, number: int) -> DispatchOutcome:
        self.counts.num_given_up += 1
        self._end(number)
        return DispatchOutcome.GIVEN_UP

    def _end(self, number: int) -> None:
        self._leave(number)
        self._waiting.pop(number, None)
        del self._items[number]
