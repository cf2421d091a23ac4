"""Checkpoints of a run: the trainer's arrays and the controller's state, of the same step."""

import asyncio
import shutil
from pathlib import Path

from forgeasync.actors import BufferActor, TrainerRecovery
from forgeasync.buffer import Update
from forgeasync.checkpoint import (
    CheckpointLost,
    CheckpointNotWritten,
    CheckpointTurns,
    RunState,
    checkpoint_bytes,
    checkpoint_name,
    existing_folder,
    list_checkpoints,
    model_shape,
    step_of,
)
from forgeasync.controller.exporting import cause_of
from forgeasync.controller.preparation import Prepared
from forgeasync.controller.recorder import RunRecorder
from forgeasync.controller.step_clock import Part, StepClock
from forgeasync.environments import digest_of
from forgeasync.faults import FaultLog, Refusal, StorageFaults

WAIT_S = 2.0
"""Seconds between two looks whether the disk has room for the last checkpoint."""

MAX_FAILURES = 3
"""The last checkpoint ends the run if it fails so often, although there seems to be room."""


class RunCheckpoints:
    """Writes checkpoints of a run to a folder.

    One that cannot be written is removed and told. Training goes on, and after a step that ends some seconds
    later another one is begun, of that step. Until it is whole, that is a fault of its own, beside those of
    files that training waits for.
    """

    def __init__(
        self,
        folder: Path,
        prepared: Prepared,
        *,
        trainer: TrainerRecovery,
        buffer: BufferActor,
        recorder: RunRecorder,
        storage: StorageFaults,
        faults: FaultLog,
    ) -> None:
        """``storage`` has the outages of the files that training waits for."""
        self.folder = folder
        self._prepared = prepared
        self._trainer = trainer
        self._buffer = buffer
        self._recorder = recorder
        self._storage = storage
        self._problems = digest_of(prepared.train)
        self._outages = StorageFaults(faults)
        self._turns = CheckpointTurns(
            prepared.config.checkpoint.every_steps, last_step=prepared.config.max_steps
        )
        self._is_under_way = False

    async def after_step(self, step: int, clock: StepClock) -> None:
        """Begin the checkpoint of ``step`` where one is due; ``clock`` measures the time until then."""
        if await self._is_due(step):
            waited_s = self._storage.waited_s
            with clock.part(Part.CHECKPOINT):
                await self.begin(step)
            clock.move(self._storage.waited_s - waited_s, Part.CHECKPOINT, Part.DISK)

    async def _is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be begun after ``step``: its turn has come, or one has failed."""
        if self._is_under_way and not await self._trainer.is_writing_checkpoint():
            await self._settle()
        if self._turns.is_turn(step):
            return True
        now_s = asyncio.get_running_loop().time()
        return not self._is_under_way and self._turns.is_retry_due(now_s) and self._has_room()

    def _has_room(self) -> bool:
        needed = checkpoint_bytes(self._prepared.config, self._prepared.facts)
        return shutil.disk_usage(existing_folder(self.folder)).free >= needed

    async def _settle(self) -> None:
        """Wait until the checkpoint under way is written; note whether it was."""
        self._is_under_way = False
        try:
            await self._trainer.finish_checkpoint()
        except Exception as error:
            cause = cause_of(error)
            if not isinstance(cause, CheckpointNotWritten):
                raise
            now_s = asyncio.get_running_loop().time()
            if isinstance(cause, CheckpointLost):
                # No disk is to blame, and the trainer that there is now can write one at once.
                self._turns.lost(now_s)
                return
            self._turns.refused(now_s)
            self._outages.refused(Refusal(path=str(self.folder), reason=str(cause)))
        else:
            self._turns.written()
            self._outages.accepted(str(self.folder))

    async def begin(self, step: int) -> None:
        """Have the trainer begin to write the checkpoint of ``step``, once the one before is written.

        Training goes on while it is written.
        """
        if self._is_under_way:
            await self._settle()
        config = self._prepared.config
        # The ledger is on the disk before the checkpoint that counts on it.
        buffer = await self._storage.while_waiting(
            self._buffer.checkpoint.call_one(), lambda: self._buffer.refusal.call_one()
        )
        state = RunState(
            step=step,
            elapsed_s=self._recorder.elapsed_s,
            model=model_shape(self._prepared.facts),
            config=config.model_dump(mode="json"),
            problems=self._problems,
            buffer=buffer.snapshot,
            ledger=buffer.ledger,
        )
        await self._trainer.begin_checkpoint(
            self.folder / checkpoint_name(step), run_state=state.encode(), keep=config.checkpoint.keep
        )
        self._is_under_way = True

    async def finish(self) -> None:
        """Wait until the checkpoint under way, if any, is written.

        Raises:
            CheckpointNotWritten: it could not be written.
        """
        self._is_under_way = False
        await self._trainer.finish_checkpoint()

    async def finish_last(self, step: int) -> None:
        """Wait until the last checkpoint of the run is written; one that has failed, until there is room.

        Raises:
            OSError: it cannot be written, although there seems to be room.
        """
        if self._is_under_way:
            await self._settle()
        num_failures_with_room = 0
        while self._turns.is_owed:
            await asyncio.sleep(WAIT_S)
            if not self._has_room():
                continue
            await self.begin(step)
            await self._settle()
            num_failures_with_room += 1
            if self._turns.is_owed and num_failures_with_room == MAX_FAILURES:
                raise OSError(f"the checkpoint of step {step} cannot be written to {self.folder}")

    async def write_now(self) -> int:
        """Write a checkpoint of a run that was told to stop, wherever it was; returns its step."""
        version = await self._trainer.policy_version()
        if (await self._buffer.snapshot.call_one()).trainer_version < version:
            # The step that was under way is complete.
            await self._buffer.committed.call_one(0.0, Update.UNKNOWN)
        if self._is_under_way:
            await self._settle()
        # It may have been this step's turn anyway, or that of the checkpoint that the run was resumed from.
        if version not in map(step_of, list_checkpoints(self.folder)):
            await self.begin(version)
            await self.finish()
        return version
