"""The buffer actor: a thin shell around the replay buffer, in a proc of its own.

Who waits for whom: see ``forgeasync.buffer.async_buffer``; calls overlap freely, and those that wait do so
here. Only small facts about groups are sent; their arrays stay where they were sampled.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint, current_rank

from forgeasync.buffer.async_buffer import AsyncReplayBuffer
from forgeasync.buffer.decisions import Batch, BufferSnapshot, Committed, DropReason, Start
from forgeasync.buffer.replay_buffer import ReplayBuffer
from forgeasync.config.run import RunConfig
from forgeasync.observability.logs import redirect_process_output
from forgeasync.rollouts.rollout import Group, GroupProgress
from forgeasync.rollouts.score import Score
from forgeasync.rollouts.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferReport:
    """The buffer's counts."""

    metrics: dict[str, float]
    num_dropped: Counter[DropReason]
    """Dropped groups so far, by reason."""


class BufferActor(Actor):
    """One replay buffer in one proc."""

    def __init__(self, log_dir: Path) -> None:
        redirect_process_output(log_dir / f"buffer-{current_rank().rank}.log")

    @concurrent_endpoint
    async def setup(self, config: RunConfig, resumed: BufferSnapshot | None) -> None:
        """Make an empty buffer, or one that continues from a snapshot."""
        state = ReplayBuffer(
            groups_per_step=config.algorithm.groups_per_step,
            group_size=config.algorithm.group_size,
            max_off_policy_steps=config.max_off_policy_steps,
            num_groups_in_run=config.max_steps * config.algorithm.groups_per_step,
            section=config.buffer,
            accounting=config.accounting,
        )
        if resumed is not None:
            state.restore(resumed)
        self._buffer = AsyncReplayBuffer(state)

    @concurrent_endpoint
    async def submit(self, tasks: Sequence[Task]) -> None:
        """Submit prompts."""
        await self._buffer.submit(tasks)

    @concurrent_endpoint
    async def start(self) -> tuple[Start, int]:
        """Wait until a group may start; also return how many prompts are wanted now."""
        return await self._buffer.start()

    @concurrent_endpoint
    async def progressed(self, groups: Sequence[GroupProgress]) -> None:
        """Take in what a generator reports about its running groups at an update."""
        await self._buffer.progressed(groups)

    @concurrent_endpoint
    async def finished(self, group: Group) -> None:
        """Take in a sampled group."""
        await self._buffer.finished(group)

    @concurrent_endpoint
    async def scored(
        self,
        group_id: int,
        rewards: Sequence[float],
        kept: Sequence[int],
        scores: Sequence[Score] | None = None,
    ) -> tuple[Group, ...]:
        """Complete a group; it is returned if it is too old by now."""
        return await self._buffer.scored(group_id, rewards, kept, scores)

    @concurrent_endpoint
    async def failed(self, group_id: int, reason: DropReason) -> None:
        """Give up a group."""
        await self._buffer.failed(group_id, reason)

    @concurrent_endpoint
    async def set_served_version(self, version: int) -> None:
        """Note that all generators sample under ``version`` from now on."""
        await self._buffer.set_served_version(version)

    @concurrent_endpoint
    async def take(self) -> Batch:
        """Wait for the next batch."""
        return await self._buffer.take()

    @concurrent_endpoint
    async def committed(self, trainer_wait_share: float) -> Committed:
        """Note that the batch was trained on."""
        return await self._buffer.committed(trainer_wait_share=trainer_wait_share)

    @concurrent_endpoint
    async def snapshot(self) -> BufferSnapshot:
        """Return the state that a buffer needs to continue from here."""
        return self._buffer.snapshot()

    @concurrent_endpoint
    async def report(self) -> BufferReport:
        state = self._buffer.state
        return BufferReport(metrics=state.metrics(), num_dropped=state.num_dropped)
