"""The replay buffer in a separate process, and its supervision.

Who waits for whom: see ``forgeasync.buffer.replay_buffer``. Calls overlap freely, and wait in this process.
Only metadata of groups is sent here; their arrays stay where they were sampled.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint, current_rank

from forgeasync.buffer import (
    Batch,
    BufferSnapshot,
    CheckpointedBuffer,
    Committed,
    DropReason,
    ReplayBuffer,
    ResumedBuffer,
    Start,
    Update,
    open_buffer,
)
from forgeasync.config import RunConfig
from forgeasync.files import Refusal
from forgeasync.observability import (
    Fault,
    FaultLog,
    ProcessListFile,
    Role,
    State,
    doing,
    open_trace,
    redirect_process_output,
    span,
    started,
)
from forgeasync.rollouts import Group, GroupProgress, Score, SpilledGroup, Task
from forgeasync.runtime.process_manager import ProcessManager
from forgeasync.runtime.supervised import ActorDied, Spawned, Supervised, SupervisedPool, call_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferReport:
    """The buffer's counts."""

    metrics: dict[str, float]
    num_dropped: Counter[DropReason]
    """Number of groups dropped so far, by reason."""


class BufferActor(Actor):
    """One replay buffer in one process."""

    def __init__(self, log_dir: Path) -> None:
        name = f"buffer-{current_rank().rank}"
        redirect_process_output(log_dir / f"{name}.log")
        open_trace(log_dir, name, idle=State.WAITING_FOR_BATCH)

    @concurrent_endpoint
    async def setup(self, config: RunConfig, ledger: Path, resumed: ResumedBuffer | None) -> int:
        """Create an empty buffer, or restore one from a checkpoint, with its ledger on disk.

        Returns the process id.
        """
        state = ReplayBuffer(
            groups_per_step=config.algorithm.groups_per_step,
            group_size=config.algorithm.group_size,
            max_off_policy_steps=config.max_off_policy_steps,
            num_groups_in_run=config.max_steps * config.algorithm.groups_per_step,
            section=config.buffer,
            accounting=config.accounting,
        )
        if resumed is not None:
            state.restore(
                resumed.checkpointed.snapshot, batches=resumed.batches, num_groups=resumed.num_groups
            )
        self._buffer = open_buffer(state, ledger, config, resumed)
        await self._buffer.durable()
        started()
        return os.getpid()

    @concurrent_endpoint
    async def beat(self) -> None:
        """Answer, to show that the event loop runs."""

    @concurrent_endpoint
    async def submit(self, tasks: Sequence[Task]) -> None:
        """Submit prompts."""
        await self._buffer.submit(tasks)

    @concurrent_endpoint
    async def start(self, most: int) -> tuple[tuple[Start, ...], int]:
        """Wait until a group may start; return up to ``most`` starts, and the number of prompts to submit."""
        return await self._buffer.start(most)

    @concurrent_endpoint
    async def progressed(self, groups: Sequence[GroupProgress]) -> None:
        """Record the progress of running groups that a generator reports at an update."""
        await self._buffer.progressed(groups)

    @concurrent_endpoint
    async def finished(self, group: Group) -> None:
        """Add a sampled group."""
        await self._buffer.finished(group)

    @concurrent_endpoint
    async def scored(
        self,
        group_id: int,
        rewards: Sequence[float],
        kept: Sequence[int],
        scores: Sequence[Score] | None = None,
    ) -> tuple[Group, ...]:
        """Complete a group; return the groups that are too old to train on."""
        return await self._buffer.scored(group_id, rewards, kept, scores)

    @concurrent_endpoint
    async def restored(self, kept: SpilledGroup) -> Group:
        """Add a finished group from before the run was resumed; return it with its new id."""
        return await self._buffer.restored(kept)

    @concurrent_endpoint
    async def failed(self, group_id: int, reason: DropReason) -> None:
        """Drop a group."""
        await self._buffer.failed(group_id, reason)

    @concurrent_endpoint
    async def set_served_version(self, version: int) -> None:
        """Record that all generators sample with ``version``."""
        await self._buffer.set_served_version(version)

    @concurrent_endpoint
    async def take(self) -> Batch:
        """Wait for the next batch."""
        return await self._buffer.take()

    @concurrent_endpoint
    async def committed(self, trainer_wait_share: float, update: Update = Update.MADE) -> Committed:
        """Record that the batch was trained on."""
        return await self._buffer.committed(trainer_wait_share=trainer_wait_share, update=update)

    @concurrent_endpoint
    async def snapshot(self) -> BufferSnapshot:
        """Return the state from which a buffer can continue."""
        return self._buffer.snapshot()

    @concurrent_endpoint
    async def checkpoint(self) -> CheckpointedBuffer:
        """Return the data for a checkpoint, once the ledger so far is on disk."""
        return await self._buffer.checkpoint()

    @concurrent_endpoint
    async def report(self) -> BufferReport:
        """Return the buffer's counts, once the ledger so far is on disk."""
        state = self._buffer.state
        metrics, num_dropped = state.metrics(), Counter(state.num_dropped)
        with doing(State.COMPUTING), span("ledger to disk"):
            written = await self._buffer.durable()
        return BufferReport(metrics=metrics | written, num_dropped=num_dropped)

    @concurrent_endpoint
    async def refusal(self) -> Refusal | None:
        """Return why the ledger cannot be written, while other calls wait for it; None if it can."""
        return self._buffer.refusal

    @concurrent_endpoint
    async def end(self) -> None:
        """Write the last line of the ledger, after the run's last step."""
        await self._buffer.end()


class BufferProcess(SupervisedPool[Supervised[BufferActor]]):
    """Supervises the buffer's process. Its loss ends the run, because the groups in it are lost.

    The next start (``--supervise``, ``--resume latest``) restores them from the newest checkpoint, the ledger
    and the finished groups that are kept on disk.
    """

    def __init__(
        self,
        spawn: Callable[[int, int], Awaitable[Spawned[BufferActor]]],
        *,
        heartbeat_s: float,
        faults: FaultLog,
        listing: ProcessListFile,
    ) -> None:
        """A healthy buffer answers within ``heartbeat_s``."""
        super().__init__(
            Role.BUFFER,
            Supervised[BufferActor],
            spawn,
            heartbeat_s=heartbeat_s,
            heartbeat_key="buffer.heartbeat_s",
            faults=faults,
            listing=listing,
        )

    def name_of(self, rank: int, number: int) -> str:
        """Return the name of the process, for messages."""
        return "the buffer"

    def _on_start_failed(self, rank: int, number: int, error: Exception) -> Exception | None:
        return error

    def _on_lost(self, replica: Supervised[BufferActor], fault: Fault) -> bool:
        self._failure = ActorDied(f"{fault.who} is gone, and with it the groups that it held")
        return False

    def _must_kill_on_close(self, replica: Supervised[BufferActor]) -> bool:
        return False

    async def close(self) -> None:
        """End the supervision; if the process has just died and ended the run, its loss is reported."""
        for replica in self.replicas:
            if await replica.proc.has_ended():
                self.lose(replica, "has died")
        await super().close()


async def start_buffer(
    processes: ProcessManager, config: RunConfig, ledger: Path, resumed: ResumedBuffer | None = None
) -> BufferActor:
    """Start the replay buffer, empty or restored; its endpoints are called with ``call_one``.

    ``ledger`` is the file that records what happens to prompts.
    """

    async def spawn(rank: int, number: int) -> Spawned[BufferActor]:
        actor = processes.spawn_here("buffer").spawn("buffer", BufferActor, processes.log_dir)
        async with call_limit(config.timeouts, "setup_s", "setting up the replay buffer"):
            pid = await actor.setup.call_one(config, ledger, resumed)
        # The process manager stops the mesh.
        return Spawned(actor=actor, pid=pid, stop=lambda: asyncio.sleep(0))

    watch = BufferProcess(
        spawn, heartbeat_s=config.buffer.heartbeat_s, faults=processes.faults, listing=processes.listing
    )
    await watch.start(1)
    processes.buffer = watch
    (buffer,) = watch.replicas
    return buffer.actor
