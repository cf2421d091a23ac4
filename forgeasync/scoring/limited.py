"""One reward of a scorer, and the limits of its calls."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from forgeasync.config import PythonReward, RewardSection, ScoredUnit, name_of
from forgeasync.environments import Response
from forgeasync.rollouts import Score, Task, VerifierCounts
from forgeasync.scoring.call_limits import CallLimits
from forgeasync.scoring.unavailable import RewardUnavailable

T = TypeVar("T")


class OneReward(Protocol):
    """One reward with what it runs in; for one event loop."""

    def start(self) -> str:
        """Start it; returns in words what it is and what isolates it."""
        ...

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        """The score of each response; ``first`` is the place of the first one in its group."""
        ...

    @property
    def version(self) -> str:
        """What tells it from others of its name, once it was started."""
        ...

    @property
    def counts(self) -> VerifierCounts:
        """Counts since it began."""
        ...

    def close(self) -> None:
        """End what it has started."""
        ...


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls; the first that raises ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def is_limited(reward: RewardSection) -> bool:
    """Whether the section of a reward limits its calls."""
    return (reward.max_concurrent, reward.max_per_s, reward.max_attempts) != (None, None, 1)


class Limited:
    """Keeps the limits of a reward's section around another ``OneReward``."""

    def __init__(
        self, reward: OneReward, section: RewardSection, *, num_replicas: int, longest_wait_s: float
    ) -> None:
        """The scorers share the limits evenly. A call whose turn would come later than in ``longest_wait_s``
        is not available."""
        self._reward = reward
        self._max_attempts = section.max_attempts
        self._is_whole = isinstance(section, PythonReward) and section.scores is ScoredUnit.GROUP
        self._limits = CallLimits(
            section, num_replicas=num_replicas, name=name_of(section), longest_wait_s=longest_wait_s
        )
        self.start = reward.start
        self.close = reward.close

    @property
    def version(self) -> str:
        """That of the reward."""
        return self._reward.version

    @property
    def counts(self) -> VerifierCounts:
        """Counts since it began."""
        return self._reward.counts

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        """The score of each response.

        Raises:
            RewardUnavailable: its turn would come too late.
            Exception: what the last of ``max_attempts`` calls has raised.
        """
        if self._is_whole:
            return await self._call(task, responses, first)
        calls = (self._call(task, [one], index) for index, one in enumerate(responses, first))
        return tuple(score for scores in await all_of(calls) for score in scores)

    async def _call(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        for attempt in range(1, self._max_attempts + 1):
            try:
                async with self._limits.inside():
                    return await self._reward.score(task, responses, first)
            except RewardUnavailable:
                raise
            except Exception:  # any type: another call may succeed
                if attempt == self._max_attempts:
                    raise
        raise AssertionError("there is a last attempt")
