"""The replay buffer for loops that wait: the state machine, and a wake-up whenever it changes.

Who waits for whom: the collecting loop waits in ``start`` until the bounds let one more group start, which
the serving loop's ``set_served_version`` and the training loop's ``take`` move; the training loop waits in
``take`` for the scoring loop's ``scored``.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from forgeasync.buffer.decisions import Batch, Committed, DropReason, Start
from forgeasync.buffer.replay_buffer import ReplayBuffer
from forgeasync.buffer.snapshot import BufferSnapshot
from forgeasync.data.progress import GroupProgress
from forgeasync.data.rollout import Group
from forgeasync.data.task import Task
from forgeasync.scoring.score import Score

T = TypeVar("T")


class AsyncReplayBuffer:
    """A ``ReplayBuffer`` shared by the loops of one event loop."""

    def __init__(self, state: ReplayBuffer) -> None:
        self.state = state
        self._changed = asyncio.Condition()

    async def submit(self, tasks: Sequence[Task]) -> None:
        """Hand prompts in."""
        for task in tasks:
            self.state.submit(task)
        await self._notify()

    async def start(self) -> tuple[Start, int]:
        """Wait until a group may start; with it, how many prompts are wanted now."""
        start = await self._when_ready(self.state.start)
        return start, self.state.num_wanted

    async def progressed(self, groups: Sequence[GroupProgress]) -> None:
        """What a generator tells of its running groups at an update."""
        for progress in groups:
            self.state.progressed(progress)
        await self._notify()

    async def finished(self, group: Group) -> None:
        """A group is sampled."""
        self.state.finished(group)
        await self._notify()

    async def scored(
        self,
        group_id: int,
        rewards: Sequence[float],
        kept: Sequence[int],
        scores: Sequence[Score] | None = None,
    ) -> tuple[Group, ...]:
        """A group is complete; returned if it is too old by now."""
        lost = self.state.scored(group_id, rewards, kept, scores)
        await self._notify()
        return lost

    async def failed(self, group_id: int, reason: DropReason) -> None:
        """A group will not come."""
        self.state.failed(group_id, reason)
        await self._notify()

    async def set_served_version(self, version: int) -> None:
        """All generators sample under ``version`` from now on."""
        self.state.set_served_version(version)
        await self._notify()

    async def take(self) -> Batch:
        """Wait for the next batch."""
        batch = await self._when_ready(self.state.take)
        await self._notify()
        return batch

    async def committed(self, *, trainer_wait_share: float) -> Committed:
        """The batch was trained on."""
        committed = self.state.committed(trainer_wait_share=trainer_wait_share)
        await self._notify()
        return committed

    def snapshot(self) -> BufferSnapshot:
        """What a buffer needs to continue from here."""
        return self.state.snapshot()

    async def _when_ready(self, attempt: Callable[[], T | None]) -> T:
        async with self._changed:
            while (result := attempt()) is None:
                await self._changed.wait()
            return result

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
