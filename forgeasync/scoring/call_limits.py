"""The limits of one reward's calls in one scorer: how many at once, and how many a second."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from forgeasync.config import LimitedReward
from forgeasync.scoring.token_bucket import TokenBucket
from forgeasync.scoring.unavailable import RewardUnavailable


class CallLimits:
    """Lets calls begin within the limits of a reward's section, of which each scorer has an equal share."""

    def __init__(
        self,
        section: LimitedReward,
        *,
        num_replicas: int,
        name: str,
        longest_wait_s: float,
        default_concurrent: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A call that would have to wait for longer than ``longest_wait_s`` is sent away instead."""
        most = default_concurrent
        if section.max_concurrent is not None:
            most = max(1, section.max_concurrent // num_replicas)
        self._places = None if most is None else asyncio.Semaphore(most)
        self._bucket = None if section.max_per_s is None else TokenBucket(section.max_per_s / num_replicas)
        self._name = name
        self._longest_wait_s = longest_wait_s
        self._clock = clock

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """One call.

        Raises:
            RewardUnavailable: it would have to wait for longer than ``longest_wait_s`` for its turn.
        """
        if self._bucket is not None:
            now_s = self._clock()
            wait_s = self._bucket.wait_s(now_s)
            if wait_s > self._longest_wait_s:
                raise RewardUnavailable(f"reward {self._name!r} is at its limit of max_per_s", wait_s)
            self._bucket.take(now_s)
            await asyncio.sleep(wait_s)
        if self._places is None:
            yield
            return
        async with self._places:
            yield
