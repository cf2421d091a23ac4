"""The replay buffer for loops that wait: the state machine, and an event whenever it changes.

Who waits for whom: the collecting loop waits in ``admit`` until the bound on age lets one more group start,
which the serving loop's ``set_served_version`` moves; the training loop waits in ``take`` for the scoring
loop's ``add``.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from forgeasync.buffer.replay_buffer import DropReason, ReplayBuffer
from forgeasync.data.rollout import Group

T = TypeVar("T")


class AsyncReplayBuffer:
    """A ``ReplayBuffer`` shared by the loops of one event loop."""

    def __init__(self, state: ReplayBuffer) -> None:
        self.state = state
        self._changed = asyncio.Condition()

    async def admit(self) -> int:
        """Wait until a group may start; its id."""
        return await self._when_ready(self.state.admit)

    async def add(self, group: Group) -> None:
        """A scored group is complete."""
        self.state.add(group)
        await self._notify()

    async def drop(self, group_id: int, reason: DropReason) -> None:
        """A group will not come."""
        self.state.drop(group_id, reason)
        await self._notify()

    async def set_served_version(self, version: int) -> None:
        """All generators sample under ``version`` from now on."""
        self.state.set_served_version(version)
        await self._notify()

    async def take(self, trainer_version: int) -> tuple[list[Group], list[Group]]:
        """Wait for the next batch; the batch, and the groups dropped as stale on the way."""
        dropped: list[Group] = []

        def attempt() -> list[Group] | None:
            dropped.extend(self.state.drop_stale(trainer_version))
            return self.state.take(trainer_version)

        batch = await self._when_ready(attempt)
        await self._notify()
        return batch, dropped

    async def _when_ready(self, attempt: Callable[[], T | None]) -> T:
        async with self._changed:
            while (result := attempt()) is None:
                await self._changed.wait()
            return result

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
