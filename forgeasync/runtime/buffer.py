"""The replay buffer in a separate process, and its supervision.

Who waits for whom: see ``open_buffer`` of ``forgeasync.buffer``. Calls overlap freely, and wait in this
process. Only metadata of groups is sent here; their arrays stay where they were sampled.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from monarch.actor import Actor, concurrent_endpoint, current_rank

from forgeasync.buffer import CheckpointedBuffer, DropReason, ReplayBuffer, ResumedBuffer, open_buffer
from forgeasync.config import RunConfig
from forgeasync.files import Refusal
from forgeasync.observability import (
    Fault,
    Role,
    State,
    doing,
    open_trace,
    redirect_process_output,
    span,
    started,
)
from forgeasync.runtime.process_manager import ProcessManager
from forgeasync.runtime.supervised import ActorDied, Spawned, Supervised, SupervisedPool, call_limit

P = ParamSpec("P")
T = TypeVar("T")


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
    async def change(
        self, act: Callable[..., T], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> T:
        """Call a method of the buffer; see ``RemoteBuffer``."""
        return self._buffer.change(lambda buffer: act(buffer, *arguments, **keywords))

    @concurrent_endpoint
    async def until(self, attempt: Callable[..., T | None], arguments: tuple[Any, ...]) -> T:
        """Call a method of the buffer until it succeeds; see ``RemoteBuffer``."""
        return await self._buffer.until(lambda buffer: attempt(buffer, *arguments))

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


class RemoteBuffer:
    """The replay buffer in its process. ``change`` and ``until`` are those of ``Monitor``.

    await buffer.change(ReplayBuffer.finished, group)
    batch = await buffer.until(ReplayBuffer.take)
    """

    def __init__(self, actor: BufferActor) -> None:
        self.checkpoint, self.report = actor.checkpoint.call_one, actor.report.call_one
        self.refusal, self.end = actor.refusal.call_one, actor.end.call_one
        self._actor = actor

    async def change(
        self, act: Callable[Concatenate[ReplayBuffer, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of the buffer and return its result."""
        result: T = await self._actor.change.call_one(act, args, kwargs)
        return result

    async def until(
        self, attempt: Callable[Concatenate[ReplayBuffer, P], T | None], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of the buffer, again after each change, until it does not return None."""
        assert not kwargs
        result: T = await self._actor.until.call_one(attempt, args)
        return result


class BufferProcess(SupervisedPool[Supervised[BufferActor]]):
    """Supervises the buffer's process. Its loss ends the run, because the groups in it are lost.

    The next start (``--supervise``, ``--resume latest``) restores them from the newest checkpoint, the ledger
    and the finished groups that are kept on disk.
    """

    role = Role.BUFFER
    heartbeat_key = "buffer.heartbeat_s"
    replica_type = Supervised[BufferActor]

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
) -> RemoteBuffer:
    """Start the replay buffer, empty or restored.

    ``ledger`` is the file that records what happens to prompts.
    """

    async def spawn(rank: int, number: int) -> Spawned[BufferActor]:
        actor = processes.spawn_here("buffer").spawn("buffer", BufferActor, processes.log_dir)
        async with call_limit(config.timeouts, "setup_s", "setting up the replay buffer"):
            pid = await actor.setup.call_one(config, ledger, resumed)
        # The process manager stops the mesh.
        return Spawned(actor=actor, pid=pid, stop=lambda: asyncio.sleep(0))

    watch = BufferProcess(spawn, processes, heartbeat_s=config.buffer.heartbeat_s)
    await watch.start(1)
    processes.buffer = watch
    (buffer,) = watch.replicas
    return RemoteBuffer(buffer.actor)
