"""Checkpoints of a run: the trainer's arrays and the controller's state, of the same step."""

import asyncio
import contextlib
import shutil
from pathlib import Path

from forgeasync.actors.buffer import BufferActor
from forgeasync.buffer.events import Update
from forgeasync.checkpoint.folders import (
    CheckpointLost,
    CheckpointNotWritten,
    checkpoint_name,
    list_checkpoints,
    step_of,
)
from forgeasync.checkpoint.room import checkpoint_bytes, existing_folder
from forgeasync.checkpoint.run_state import RunState, model_shape
from forgeasync.controller.exporting import cause_of
from forgeasync.controller.preparation import Prepared
from forgeasync.controller.recorder import RunRecorder
from forgeasync.controller.trainer_recovery import TrainerRecovery
from forgeasync.environments.sources import digest_of
from forgeasync.faults.appended_file import Refusal
from forgeasync.faults.storage import StorageFaults

WAIT_S = 2.0
"""Seconds between two attempts at the last checkpoint, and between two looks for room."""

MAX_FAILURES = 3
"""The last checkpoint ends the run if it fails so often, although there seems to be room."""


class RunCheckpoints:
    """Writes checkpoints of a run to a folder.

    One that cannot be written is removed, told and tried again at a later step, with the weights of that
    step; training goes on meanwhile.
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
    ) -> None:
        self.folder = folder
        self._prepared = prepared
        self._trainer = trainer
        self._buffer = buffer
        self._recorder = recorder
        self._storage = storage
        self._problems = digest_of(prepared.train)
        self._is_under_way = False
        self._num_failures = 0
        """In a row."""
        self._retry_at_step = 0

    async def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be begun after ``step``: its turn has come, or one has failed."""
        every_steps = self._prepared.config.checkpoint.every_steps
        is_turn = every_steps is not None and step % every_steps == 0
        if self._is_under_way and (is_turn or not await self._trainer.is_writing_checkpoint()):
            await self._settle(step)
        return is_turn or (self._num_failures > 0 and step >= self._retry_at_step and self._has_room())

    def _has_room(self) -> bool:
        needed = checkpoint_bytes(self._prepared.config, self._prepared.facts)
        return shutil.disk_usage(existing_folder(self.folder)).free >= needed

    async def _settle(self, step: int) -> None:
        """Wait until the checkpoint under way is written; note whether it was."""
        self._is_under_way = False
        try:
            await self._trainer.finish_checkpoint()
        except Exception as error:
            cause = cause_of(error)
            if not isinstance(cause, CheckpointNotWritten):
                raise
            if isinstance(cause, CheckpointLost):
                # No disk is to blame, and the trainer that there is now can write one at once.
                self._num_failures, self._retry_at_step = 1, step
                return
            # Each failure doubles the number of steps to the next attempt.
            self._retry_at_step = step + 2**self._num_failures
            self._num_failures += 1
            self._storage.refused(Refusal(path=str(self.folder), reason=str(cause)))
        else:
            self._num_failures = 0
            self._storage.accepted(str(self.folder))

    async def begin(self, step: int) -> None:
        """Have the trainer begin to write the checkpoint of ``step``; training goes on meanwhile."""
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
        await self._settle(step)
        num_failures_with_room = 0
        while self._num_failures:
            await asyncio.sleep(WAIT_S)
            if not self._has_room():
                continue
            await self.begin(step)
            await self._settle(step)
            num_failures_with_room += 1
            if self._num_failures and num_failures_with_room == MAX_FAILURES:
                raise OSError(f"the checkpoint of step {step} cannot be written to {self.folder}")

    async def write_now(self) -> int:
        """Write a checkpoint of a run that was told to stop, wherever it was; returns its step."""
        version = await self._trainer.policy_version()
        if (await self._buffer.snapshot.call_one()).trainer_version < version:
            # The step that was under way is complete.
            await self._buffer.committed.call_one(0.0, Update.UNKNOWN)
        with contextlib.suppress(CheckpointLost):
            await self.finish()
        # It may have been this step's turn anyway, or that of the checkpoint that the run was resumed from.
        if version not in map(step_of, list_checkpoints(self.folder)):
            await self.begin(version)
            await self.finish()
        return version
