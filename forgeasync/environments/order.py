"""The endless order in which training problems are issued."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from forgeasync.environments.stored_tasks import StoredTasks
from forgeasync.rollouts import Task

_BLOCK = 4096
"""Number of draws of sources that are made at a time."""


class Order(Protocol):
    """Issues tasks for ever; its whole state is one number, ``position``."""

    @property
    def position(self) -> int:
        """Number of tasks issued so far."""
        ...

    def next(self) -> Task:
        """Issue the next task."""
        ...


class TaskOrder:
    """Passes over ``tasks`` for ever; ``seed`` and the number of the pass determine its order.

    The order depends on ``position`` alone, not on how it was reached, so one int restores it.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, position: int = 0) -> None:
        assert len(tasks), "an order of no tasks has no next one"
        assert position >= 0, f"position {position} is negative"
        self._tasks = tasks
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


class WeightedOrder:
    """Draws a source at random for every task, in proportion to the sources' weights.

    Each source has its own passes. ``seed`` and the position alone determine which source is drawn, and also
    the place in its passes, which is how often it was drawn before.
    """

    def __init__(
        self, sources: Sequence[Sequence[Task]], weights: Sequence[float], *, seed: int, position: int = 0
    ) -> None:
        assert len(sources) == len(weights) and min(weights) > 0.0 and position >= 0
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._seed = seed
        self._position = position
        self._block = -1
        self._drawn = np.empty(0, dtype=np.int64)
        num_drawn = np.zeros(len(sources), dtype=np.int64)
        for block in range(position // _BLOCK):
            num_drawn += np.bincount(self._draw(block), minlength=len(sources))
        rest = self._draw(position // _BLOCK)[: position % _BLOCK]
        num_drawn += np.bincount(rest, minlength=len(sources))
        self._orders = [
            # Each source has its own seed; otherwise sources of equal size would be issued in the same order.
            TaskOrder(tasks, seed=_seed_of_source(seed, index), position=int(num))
            for index, (tasks, num) in enumerate(zip(sources, num_drawn, strict=True))
        ]

    @property
    def position(self) -> int:
        """Number of tasks issued so far."""
        return self._position

    def next(self) -> Task:
        """Issue the next task."""
        block, index = divmod(self._position, _BLOCK)
        if block != self._block:
            self._block, self._drawn = block, self._draw(block)
        self._position += 1
        return self._orders[self._drawn[index]].next()

    def _draw(self, block: int) -> np.ndarray:
        """Draw the sources of the tasks in a block."""
        rng = np.random.default_rng([self._seed, _SOURCES_KEY, block])
        return rng.choice(len(self._shares), size=_BLOCK, p=self._shares)


_SOURCES_KEY = 2_718_281_828
"""Separates draws of sources from other draws with the run's seed."""


def _seed_of_source(seed: int, index: int) -> int:
    return int(np.random.SeedSequence((seed, _SOURCES_KEY, index)).generate_state(1)[0])


def weighted_order(
    tasks: Sequence[Task], weights: Mapping[str, float], *, seed: int, position: int = 0
) -> Order:
    """Return the order of a run's training problems; ``weights`` has the weight of each source by name."""
    if len(weights) == 1:
        return TaskOrder(tasks, seed=seed, position=position)
    places: dict[str, list[int]] = {name: [] for name in weights}
    for place, task in enumerate(tasks):
        places[task.source].append(place)
    by_source = [StoredTasks(tasks[place] for place in of_source) for of_source in places.values()]
    return WeightedOrder(by_source, list(weights.values()), seed=seed, position=position)


def sampling_seed(run_seed: int, draw_id: int) -> int:
    """Return the sampling seed of a group: 64 bits, so that no two groups of a run share one."""
    return int(np.random.SeedSequence((run_seed, draw_id)).generate_state(1, np.uint64)[0])
