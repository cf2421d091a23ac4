"""The replay buffer for loops that wait.

Who waits for whom: the collecting loop waits in ``start`` until the bounds let one more group start, which
the serving loop's ``set_served_version`` and the training loop's ``take`` move; the training loop waits in
``take`` for the scoring loop's ``scored``.
"""

from collections.abc import Sequence

from forgeasync.buffer.decisions import Batch, BufferSnapshot, Committed, DropReason, Start
from forgeasync.buffer.events import Update
from forgeasync.buffer.replay_buffer import ReplayBuffer
from forgeasync.rollouts import Group, GroupProgress, Score, SpilledGroup, Task
from forgeasync.waiting import Monitor


class AsyncReplayBuffer(Monitor[ReplayBuffer]):
    """A ``ReplayBuffer`` shared by the loops of one event loop."""

    async def submit(self, tasks: Sequence[Task]) -> None:
        """Hand prompts in."""
        for task in tasks:
            self._submit(task)

    def _submit(self, task: Task) -> None:
        self.change(lambda buffer: buffer.submit(task))

    async def start(self, most: int) -> tuple[tuple[Start, ...], int]:
        """Wait until a group may start; all that may, at most ``most``, and how many prompts are wanted."""
        starts = [await self.until(lambda buffer: buffer.start())]
        while len(starts) < most and (start := self.change(lambda buffer: buffer.start())) is not None:
            starts.append(start)
        return tuple(starts), self.state.num_wanted

    async def progressed(self, groups: Sequence[GroupProgress]) -> None:
        """Take in what a generator reports about its running groups at an update."""
        for progress in groups:
            self._progressed(progress)

    def _progressed(self, progress: GroupProgress) -> None:
        self.change(lambda buffer: buffer.progressed(progress))

    async def finished(self, group: Group) -> None:
        """A group is sampled."""
        self.change(lambda buffer: buffer.finished(group))

    async def scored(
        self,
        group_id: int,
        rewards: Sequence[float],
        kept: Sequence[int],
        scores: Sequence[Score] | None = None,
    ) -> tuple[Group, ...]:
        """A group is complete; returned if it is too old by now."""
        return self.change(lambda buffer: buffer.scored(group_id, rewards, kept, scores))

    async def restored(self, kept: SpilledGroup) -> Group:
        """Take in a finished group from before the run was resumed; returned with its new number."""
        return self.change(lambda buffer: buffer.restored(kept))

    async def failed(self, group_id: int, reason: DropReason) -> None:
        """A group will not come."""
        self.change(lambda buffer: buffer.failed(group_id, reason))

    async def set_served_version(self, version: int) -> None:
        """Note that all generators sample under ``version`` from now on."""
        self.change(lambda buffer: buffer.set_served_version(version))

    async def take(self) -> Batch:
        """Wait for the next batch, which makes room for further groups."""
        return await self.until(lambda buffer: buffer.take())

    async def committed(self, *, trainer_wait_share: float, update: Update = Update.MADE) -> Committed:
        """The batch was trained on."""
        return self.change(
            lambda buffer: buffer.committed(trainer_wait_share=trainer_wait_share, update=update)
        )

    def snapshot(self) -> BufferSnapshot:
        """Return the state that a buffer needs to continue from here."""
        return self.state.snapshot()
