"""The endless order in which training problems are issued."""

from collections.abc import Sequence

import numpy as np

from forgeasync.data.task import Task


class TaskOrder:
    """Passes over ``tasks`` for ever, each pass in an order that follows from ``seed`` and its number.

    The order depends on ``position`` alone, not on how it was reached, so one int restores it.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, position: int = 0) -> None:
        assert tasks, "an order of no tasks has no next one"
        assert position >= 0, f"position {position} is negative"
        self._tasks = tuple(tasks)
        self._seed = seed
        self._position = position
        self._epoch: int | None = None
        self._permutation = np.empty(0, dtype=np.int64)

    @property
    def position(self) -> int:
        """Number of tasks issued so far, over all passes."""
        return self._position

    @property
    def epoch(self) -> int:
        """Number of complete passes so far."""
        return self._position // len(self._tasks)

    def next(self) -> Task:
        """Issue the next task."""
        if self._epoch != self.epoch:
            self._epoch = self.epoch
            self._permutation = np.random.default_rng([self._seed, self.epoch]).permutation(len(self._tasks))
        task = self._tasks[self._permutation[self._position % len(self._tasks)]]
        self._position += 1
        return task

    def restore(self, position: int) -> None:
        """Continue as if ``position`` tasks had been issued."""
        assert position >= 0, f"position {position} is negative"
        self._position = position
