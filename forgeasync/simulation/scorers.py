"""Scoring in a simulated run: the real dispatcher says which scorer gets which response."""

from collections import deque
from collections.abc import Callable

from forgeasync.config import ScorerSection
from forgeasync.scoring import Assignment, Dispatcher
from forgeasync.simulation.clock import Clock
from forgeasync.simulation.groups import SimulatedGroup


class Scorers:
    """Responses are scored as they end; a group is done when all of its are.

    Each scorer has so many places, or ``num_workers`` if these are more, and in each one response at a time.
    """

    def __init__(
        self,
        section: ScorerSection,
        cores: float,
        clock: Clock,
        on_scored: Callable[[SimulatedGroup], None],
        *,
        num_places: int,
    ) -> None:
        self._section = section
        self._cores = cores
        self._clock = clock
        self._on_scored = on_scored
        self._dispatcher = Dispatcher(section.num_replicas, section, retry_wait_s=0.0)
        self._free = [max(num_places, section.num_workers)] * section.num_replicas
        self._queues: list[deque[Assignment]] = [deque() for _ in range(section.num_replicas)]
        self._responses: dict[int, tuple[SimulatedGroup, float]] = {}
        """What every item is, and how long it takes."""
        self._groups_left = section.max_concurrent
        """Finished groups that may still be waited for."""
        self._finished: deque[SimulatedGroup] = deque()
        self._waited_for: set[int] = set()
        self._unsubmitted: deque[SimulatedGroup] = deque()
        self.busy_s = 0.0
        """Seconds of workers that score."""

    def response_ended(self, group: SimulatedGroup, index: int) -> None:
        """A response of a group that may still be sampled."""
        if not self._submit(group, index):
            group.unsubmitted.append(index)
        self._go_on()

    def group_ended(self, group: SimulatedGroup) -> None:
        """All responses of a group are there."""
        self._finished.append(group)
        self._wait_for_more()
        self._go_on()

    def forget(self, group: SimulatedGroup) -> None:
        """A group was given up while it was sampled."""
        for item in group.items:
            self._dispatcher.withdraw(item)

    # ---- inside

    def _submit(self, group: SimulatedGroup, index: int) -> bool:
        item = self._dispatcher.submit(self._clock.now_s)
        if item is None:
            return False
        group.items.append(item)
        self._responses[item] = group, group.sequences[index].rollout.score_s
        return True

    def _wait_for_more(self) -> None:
        while self._finished and self._groups_left:
            self._groups_left -= 1
            group = self._finished.popleft()
            self._waited_for.add(group.group_id)
            if group.unsubmitted:
                self._unsubmitted.append(group)
            self._end_if_scored(group)

    def _end_if_scored(self, group: SimulatedGroup) -> None:
        if group.group_id in self._waited_for and group.num_scored == len(group.sequences):
            self._waited_for.remove(group.group_id)
            self._groups_left += 1
            self._on_scored(group)

    def _go_on(self) -> None:
        while (assignment := self._dispatcher.next(self._clock.now_s)) is not None:
            self._queues[assignment.replica].append(assignment)
            self._work(assignment.replica)
        while self._unsubmitted:
            group = self._unsubmitted[0]
            if not self._submit(group, group.unsubmitted[0]):
                return
            group.unsubmitted.pop(0)
            if not group.unsubmitted:
                self._unsubmitted.popleft()
            self._go_on()

    def _work(self, replica: int) -> None:
        while self._queues[replica] and self._free[replica]:
            assignment = self._queues[replica].popleft()
            _, score_s = self._responses[assignment.item]
            self._free[replica] -= 1
            self.busy_s += score_s
            self._score(score_s, lambda given=assignment: self._scored(given))

    def _score(self, score_s: float, then: Callable[[], None]) -> None:
        """Wait for what others compute, then compute: only the latter takes longer where cores are short."""
        computing = min(1.0, self._cores)
        self._clock.wall.after(
            (1.0 - computing) * score_s,
            lambda: self._clock.compute(computing * score_s, max(1.0, self._cores), then),
        )

    def _scored(self, assignment: Assignment) -> None:
        group, _ = self._responses.pop(assignment.item)
        self._free[assignment.replica] += 1
        self._dispatcher.scored(assignment)
        self._work(assignment.replica)
        if not group.is_ended:
            group.num_scored += 1
            self._end_if_scored(group)
        self._wait_for_more()
        self._go_on()
