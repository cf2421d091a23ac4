"""A few processes that run one of the user's own rewards, handed out to threads."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from forgeasync.config import PythonReward, name_of
from forgeasync.environments import Response
from forgeasync.rollouts import Score, Task, VerifierCounts
from forgeasync.scoring.reward_process import (
    ProcessKilled,
    RewardFailure,
    RewardProcess,
    RewardTimeout,
)

CALLS_SIDE_BY_SIDE = 64
"""Most concurrent calls of a coroutine in each process."""

MAX_KILLED = 3
"""Most times that a call is repeated because another call had its process killed."""


class RewardPool:
    """Runs one reward in ``num_processes`` processes; thread-safe. A call takes a place in one of them.

    Waiting for a place counts against no limit.
    """

    def __init__(self, section: PythonReward, num_processes: int) -> None:
        """Store the settings; ``start`` starts the processes."""
        self._section = section
        self._name = name_of(section)
        self._processes = [RewardProcess(section) for _ in range(num_processes)]
        self._num_calls = [0] * num_processes
        self._calls_at_once = 1
        self._place_is_free = threading.Condition()

    @property
    def num_places(self) -> int:
        """Number of calls that can run at once, after ``start``."""
        return self._calls_at_once * len(self._processes)

    @property
    def num_killed(self) -> int:
        """Number of processes that were killed because a call did not end."""
        return sum(process.num_killed for process in self._processes)

    @property
    def counts(self) -> VerifierCounts:
        """Counts since it began."""
        return VerifierCounts(num_killed_rewards=self.num_killed)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running processes."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    @property
    def version(self) -> str:
        """A digest of the reward's code, as the process has read it that began last; "" before ``start``."""
        return next((one.version for one in reversed(self._processes) if one.version), "")

    def start(self) -> str:
        """Start all processes concurrently; returns how many. Raises as ``RewardProcess.start``."""
        with ThreadPoolExecutor(len(self._processes)) as threads:
            (is_async, *_) = threads.map(RewardProcess.start, self._processes)
        self._calls_at_once = CALLS_SIDE_BY_SIDE if is_async else 1
        how = f"up to {CALLS_SIDE_BY_SIDE} calls" if is_async else "one call"
        return f"{len(self._processes)} processes run reward {self._name!r}, {how} at a time each"

    def score(self, task: Task, responses: Sequence[Response], rollouts: str) -> tuple[Score, ...]:
        """Score responses to one task; ``rollouts`` names them in errors ("rollout 3").

        Raises:
            RewardFailure: the reward has not scored; names it, the task and the rollouts.
        """
        try:
            for _ in range(MAX_KILLED):
                index = self._take_place()
                try:
                    return self._processes[index].call(task, responses)
                except ProcessKilled:
                    continue
                finally:
                    self._free_place(index)
            raise RewardFailure(f"had its process killed {MAX_KILLED} times over other calls")
        except RewardFailure as error:
            kind = RewardTimeout if isinstance(error, RewardTimeout) else RewardFailure
            where = f"reward {self._name!r} ({self._section.factory}) on task {task.task_id}, {rollouts}"
            raise kind(f"{where}: {error}") from None

    def close(self) -> None:
        """Stop the processes; a later call starts new ones."""
        for process in self._processes:
            process.stop()

    def _take_place(self) -> int:
        with self._place_is_free:
            index = min(range(len(self._processes)), key=self._num_calls.__getitem__)
            while self._num_calls[index] >= self._calls_at_once:
                self._place_is_free.wait()
                index = min(range(len(self._processes)), key=self._num_calls.__getitem__)
            self._num_calls[index] += 1
            return index

    def _free_place(self, index: int) -> None:
        with self._place_is_free:
            self._num_calls[index] -= 1
            self._place_is_free.notify()
