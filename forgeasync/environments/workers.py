"""States of the environment workers, and the number of episodes that each one runs."""

from dataclasses import dataclass, field
from enum import StrEnum


class WorkerState(StrEnum):
    """State of a worker that is not gone."""

    STARTING = "starting"
    READY = "ready"
    RETIRING = "retiring"


@dataclass(slots=True)
class _Worker:
    state: WorkerState = WorkerState.STARTING
    num_live: int = 0


@dataclass(slots=True)
class WorkerTable:
    """The workers, by numbers that are never reused. A pure state machine.

        starting -> ready -> retiring -> gone
            |         |          |
            +---------+----------+--> gone (it died or stopped answering; another one starts in its place)

    An episode goes to the ready worker with the fewest episodes. A retiring worker gets no more episodes, and
    can be stopped when its last one has ended.
    """

    max_live_per_worker: int
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _next_number: int = 0
    num_lost: int = 0
    """Number of workers that died, stopped answering, or were replaced because of stuck threads."""

    def start(self) -> int:
        """Add a worker that is starting; return its number."""
        number = self._next_number
        self._next_number += 1
        self._workers[number] = _Worker()
        return number

    def ready(self, number: int) -> None:
        """Mark a worker as ready, unless it is gone."""
        if number in self._workers:
            assert self._workers[number].state is WorkerState.STARTING
            self._workers[number].state = WorkerState.READY

    def retire(self, number: int) -> None:
        """Assign no further episodes to a worker."""
        if number in self._workers:
            self._workers[number].state = WorkerState.RETIRING

    def lose(self, number: int) -> None:
        """Remove a worker that is lost with its episodes, unless it is gone already."""
        if self._workers.pop(number, None) is not None:
            self.num_lost += 1

    def assign(self) -> int | None:
        """Assign an episode to a worker and return the worker's number; None if no worker has room."""
        ready = [
            (worker.num_live, number)
            for number, worker in self._workers.items()
            if worker.state is WorkerState.READY and worker.num_live < self.max_live_per_worker
        ]
        if not ready:
            return None
        _, number = min(ready)
        self._workers[number].num_live += 1
        return number

    def ended(self, number: int) -> None:
        """Record the end of an episode of a worker, which may be gone."""
        if number in self._workers:
            self._workers[number].num_live -= 1
            assert self._workers[number].num_live >= 0, "ended once"

    @property
    def retired(self) -> tuple[int, ...]:
        """Retiring workers without episodes, which can be stopped."""
        return tuple(
            number
            for number, worker in self._workers.items()
            if worker.state is WorkerState.RETIRING and not worker.num_live
        )

    @property
    def numbers(self) -> tuple[int, ...]:
        """All workers that are not gone."""
        return tuple(self._workers)

    @property
    def num_live(self) -> int:
        """Number of episodes in flight."""
        return sum(worker.num_live for worker in self._workers.values())
