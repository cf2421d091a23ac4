"""A replay buffer that keeps a ledger of its prompts.

The ledger is written where the buffer changes, by the buffer's own process: events are in the order in which
they happened, and none has to travel. What others see of a change may be ahead of the disk by
``journal.SYNC_EVERY_S`` and a flush, with two exceptions. A checkpoint is begun only once the ledger up to it
is on the disk. The report that the metrics of a step are made of is given only once the step is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from forgeasync.buffer import AsyncReplayBuffer, ReplayBuffer
from forgeasync.config import RunConfig
from forgeasync.faults import Refusal
from forgeasync.ledger.journal import Journal
from forgeasync.ledger.journal_file import JournalFile
from forgeasync.ledger.lines import (
    FORMAT,
    START,
    Checkpointed,
    CheckpointedBuffer,
    Ended,
    Opened,
    Resumed,
    ResumedBuffer,
)

T = TypeVar("T")


class RunHasEnded(RuntimeError):
    """A call came after the end of the ledger, from a loop that was being cancelled."""


class JournaledBuffer(AsyncReplayBuffer):
    """An ``AsyncReplayBuffer`` whose every change goes into a journal."""

    def __init__(self, state: ReplayBuffer, journal: Journal) -> None:
        super().__init__(state)
        self._journal = journal
        self._is_ended = False

    def change(self, act: Callable[[ReplayBuffer], T]) -> T:
        """Call ``act``, note what it did, and wake who waits."""
        self._refuse_after_end()
        result = super().change(act)
        self._journal.append(self.state.events.take())
        return result

    async def until(
        self,
        attempt: Callable[[ReplayBuffer], T | None],
        *,
        look_at_s: Callable[[ReplayBuffer], float | None] = lambda state: None,
    ) -> T:
        """Wait for an attempt to succeed, and note what it did."""
        self._refuse_after_end()
        result = await super().until(attempt, look_at_s=look_at_s)
        self._journal.append(self.state.events.take())
        return result

    async def checkpoint(self) -> CheckpointedBuffer:
        """Return what a checkpoint needs, once the ledger up to here is on the disk."""
        snapshot = self.state.snapshot()
        self._journal.append([Checkpointed(step=snapshot.trainer_version)])
        position = self._journal.position
        await self._journal.durable()
        return CheckpointedBuffer(snapshot=snapshot, ledger=position)

    async def durable(self) -> dict[str, float]:
        """Wait until all that has happened by now is on the disk; return the journal's metrics."""
        metrics = self._journal.metrics()
        await self._journal.durable()
        return metrics

    @property
    def refusal(self) -> Refusal | None:
        """What the ledger's disk refuses at this moment; whoever waits for the ledger waits for it."""
        return self._journal.refusal

    async def end(self) -> None:
        """The run has made all its steps: whatever prompts are left end unfinished."""
        self._refuse_after_end()
        self._is_ended = True
        left = self.state.snapshot()
        unfinished = (one.submission_id for one in (*left.started, *left.complete, *left.pending))
        self._journal.append([Ended(unfinished=tuple(sorted(unfinished)))])
        await self._journal.close()

    def _refuse_after_end(self) -> None:
        if self._is_ended:
            raise RunHasEnded("the run has ended; its prompts are accounted for")


def open_buffer(
    state: ReplayBuffer, file: Path, config: RunConfig, resumed: ResumedBuffer | None
) -> JournaledBuffer:
    """Begin the ledger of a run, or go on with it. Without a file a resumed run begins one at its step.

    ``state`` is new, or restored from ``resumed``. A torn last line has been cut before.

    Raises:
        FileExistsError: a new run's folder has a ledger.
        JournalInUse: another process writes it.
        ValueError: the last line of the ledger to go on with is none.
    """
    groups_per_step = config.algorithm.groups_per_step
    if resumed is not None and file.exists():
        opened, position = JournalFile.reopen(file)
        event: Resumed | Opened = Resumed(
            step=resumed.checkpointed.snapshot.trainer_version,
            line=resumed.checkpointed.ledger.num_lines,
            groups_per_step=groups_per_step,
            batches=resumed.batches,
        )
    else:
        opened, position = JournalFile.create(file), START
        # A new buffer has nothing behind it and nothing in it.
        now = state.snapshot()
        event = Opened(
            format=FORMAT,
            run=config.name,
            seed=config.seed,
            groups_per_step=groups_per_step,
            step=now.trainer_version,
            next_group=now.next_group_id,
            num_submitted=now.num_submitted,
            waiting=tuple((one.submission_id, one.attempt) for one in now.pending),
        )
    journal = Journal(opened, position)
    journal.append([event])
    return JournaledBuffer(state, journal)
