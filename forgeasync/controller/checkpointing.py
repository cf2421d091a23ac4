"""Checkpoints of a run: the trainer's arrays and the controller's state, of the same step."""

from pathlib import Path

from forgeasync.actors.buffer import BufferActor
from forgeasync.actors.trainer_mesh import TrainerMesh
from forgeasync.checkpoint.folders import checkpoint_name, list_checkpoints, step_of
from forgeasync.checkpoint.run_state import RunState, model_shape
from forgeasync.controller.preparation import Prepared
from forgeasync.controller.recorder import RunRecorder


class RunCheckpoints:
    """Writes checkpoints of a run to a folder."""

    def __init__(
        self,
        folder: Path,
        prepared: Prepared,
        *,
        trainer: TrainerMesh,
        buffer: BufferActor,
        recorder: RunRecorder,
    ) -> None:
        self.folder = folder
        self._prepared = prepared
        self._trainer = trainer
        self._buffer = buffer
        self._recorder = recorder

    async def begin(self, step: int) -> None:
        """Have the trainer begin to write the checkpoint of ``step``; training goes on meanwhile."""
        config = self._prepared.config
        state = RunState(
            step=step,
            elapsed_s=self._recorder.elapsed_s,
            model=model_shape(self._prepared.facts),
            config=config.model_dump(mode="json"),
            buffer=await self._buffer.snapshot.call_one(),
        )
        await self._trainer.begin_checkpoint(
            self.folder / checkpoint_name(step), run_state=state.encode(), keep=config.checkpoint.keep
        )

    async def finish(self) -> None:
        """Wait until the checkpoint under way, if any, is written."""
        await self._trainer.finish_checkpoint()

    async def write_now(self) -> int:
        """Write a checkpoint of a run that was told to stop, wherever it was; returns its step."""
        version = await self._trainer.policy_version()
        if (await self._buffer.snapshot.call_one()).trainer_version < version:
            # The step that was under way is complete.
            await self._buffer.committed.call_one(0.0)
        await self.finish()
        # It may have been this step's turn anyway, or that of the checkpoint that the run was resumed from.
        if version not in map(step_of, list_checkpoints(self.folder)):
            await self.begin(version)
            await self.finish()
        return version
