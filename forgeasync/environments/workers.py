"""Environment workers: which there are and which episodes they run, and what is left of one that is gone."""

from dataclasses import dataclass, field
from enum import StrEnum


class WorkerState(StrEnum):
    """What a worker can be asked to do."""

    STARTING = "starting"
    READY = "ready"
    RETIRING = "retiring"


@dataclass(slots=True)
class _Worker:
    state: WorkerState = WorkerState.STARTING
    num_live: int = 0


@dataclass(slots=True)
class WorkerTable:
    """The workers by their numbers, which are never used twice: a pure state machine.

        starting -> ready -> retiring -> gone
            |         |          |
            +---------+----------+--> gone (it died or stopped answering; another one starts in its place)

    Episodes go to the ready worker with the fewest of them. A retiring worker gets no more and is gone when
    its last one has ended.
    """

    max_live_per_worker: int
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _next_number: int = 0
    num_lost: int = 0
    """Workers that died or stopped answering, or had to be replaced for the threads that they were stuck
    with."""

    def start(self) -> int:
        """A worker is being started; returns its number."""
        number = self._next_number
        self._next_number += 1
        self._workers[number] = _Worker()
        return number

    def ready(self, number: int) -> None:
        """A worker answers; no news if it is gone already."""
        if number in self._workers:
            assert self._workers[number].state is WorkerState.STARTING
            self._workers[number].state = WorkerState.READY

    def retire(self, number: int) -> None:
        """Give a worker no further episodes."""
        if number in self._workers:
            self._workers[number].state = WorkerState.RETIRING

    def lose(self, number: int) -> None:
        """A worker is gone, with the episodes that it was running; no news if it was gone already."""
        if self._workers.pop(number, None) is not None:
            self.num_lost += 1

    def assign(self) -> int | None:
        """Give an episode to a worker; None while none has room."""
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
        """An episode of a worker has ended; the worker may be gone."""
        if number in self._workers:
            self._workers[number].num_live -= 1
            assert self._workers[number].num_live >= 0, "ended once"

    @property
    def retired(self) -> tuple[int, ...]:
        """Retiring workers without episodes: they can be stopped."""
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
        """Episodes under way."""
        return sum(worker.num_live for worker in self._workers.values())
