"""Saves what a run has learned: checkpoints, the model at its end, the newest weights if it fails.

    RunCheckpoints         the trainer's arrays and the controller's state of the same step, beside training
    export                 the trained model, in ``checkpoints/final``
    save_newest_weights    the newest good weights of a run that ends early, in ``checkpoints/last``

A full disk ends no run: a checkpoint or an export that cannot be written is tried again.
"""

import asyncio
import logging
import shutil
import signal
from pathlib import Path
from typing import Protocol

from monarch.actor import ActorError

from forgeasync.buffer import Update
from forgeasync.checkpoints import (
    LAST,
    LAST_PUBLISHED,
    CheckpointLost,
    CheckpointNotWritten,
    RunState,
    checkpoint_bytes,
    checkpoint_name,
    existing_folder,
    export_bytes,
    list_checkpoints,
    model_shape,
    step_of,
)
from forgeasync.config import RunConfig
from forgeasync.controller.cli import received_signal
from forgeasync.controller.preparation import Prepared
from forgeasync.controller.recorder import Part, RunRecorder, StepTimes
from forgeasync.controller.serving import WeightServing
from forgeasync.environments import digest_of
from forgeasync.files import Refusal
from forgeasync.models import FolderNotWritten, HfFolderWriter
from forgeasync.observability import FaultLog, RunDir, StorageFaults, describe_error, root_cause
from forgeasync.runtime import ActorDied, BufferActor, HostLost, TrainerRecovery
from forgeasync.waiting import DeadlineExceeded, deadline
from forgeasync.weights import StagedVersion, StagedWeights

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
"""Seconds from a checkpoint that could not be written to the next attempt.

Each failure in a row doubles them."""

MAX_RETRY_S = 30.0
"""Most seconds between two attempts."""

WAIT_S = 2.0
"""Seconds between two attempts at the last checkpoint or the export, and between two looks for room."""

MAX_FAILURES = 3
"""The last checkpoint or the export ends the run if it fails so often, although there seems to be room."""


class CheckpointTurns:
    """Says after which steps a checkpoint is due: a state machine without a clock and without files.

    One is due every ``every_steps`` steps, after the last step, and while one that could not be written is
    still owed.
    """

    def __init__(self, every_steps: int | None, *, last_step: int) -> None:
        """``every_steps`` None: no checkpoint is ever due."""
        self._every_steps = every_steps
        self._last_step = last_step
        self._num_failures = 0
        """In a row."""
        self._retry_at_s: float | None = None

    def is_turn(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is due, whatever became of those before."""
        if self._every_steps is None:
            return False
        return step % self._every_steps == 0 or step == self._last_step

    @property
    def is_owed(self) -> bool:
        """Whether the checkpoint that was begun last could not be written."""
        return self._retry_at_s is not None

    def is_retry_due(self, now_s: float) -> bool:
        """Whether the checkpoint that is owed can be tried again at ``now_s``."""
        return self._retry_at_s is not None and now_s >= self._retry_at_s

    def written(self) -> None:
        """Note that the checkpoint begun last is whole."""
        self._num_failures, self._retry_at_s = 0, None

    def refused(self, now_s: float) -> None:
        """Note that a disk has refused the checkpoint begun last."""
        self._retry_at_s = now_s + min(MAX_RETRY_S, FIRST_RETRY_S * 2**self._num_failures)
        self._num_failures += 1

    def lost(self, now_s: float) -> None:
        """Note that the checkpoint begun last was lost with its trainer: another can begin at once."""
        self._num_failures, self._retry_at_s = 0, now_s


class RunCheckpoints:
    """Writes the checkpoints of a run to a folder, while training goes on.

    A checkpoint that cannot be written is removed and reported, and another one is begun after a later step.
    Until that one is whole, the outage is a fault of its own, apart from those of files that training waits
    for.
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
        config = prepared.config
        self._turns = CheckpointTurns(config.checkpoint.every_steps, last_step=config.max_steps)
        self._num_bytes = checkpoint_bytes(config, prepared.facts)
        self._is_in_flight = False

    async def after_step(self, step: int, times: StepTimes) -> None:
        """Begin the checkpoint of ``step`` if one is due; ``times`` measures the time until it has begun."""
        if await self._is_due(step):
            waited_s = self._storage.waited_s
            with times.part(Part.CHECKPOINT):
                await self.begin(step)
            times.move(self._storage.waited_s - waited_s, Part.CHECKPOINT, Part.DISK)

    async def _is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be begun after ``step``: its turn has come, or one has failed."""
        if self._is_in_flight and not await self._trainer.is_writing_checkpoint():
            await self._settle()
        if self._turns.is_turn(step):
            return True
        is_retry = not self._is_in_flight and self._turns.is_retry_due(asyncio.get_running_loop().time())
        return is_retry and _has_room(self.folder, self._num_bytes)

    async def _settle(self) -> None:
        """Wait until the checkpoint in flight, if any, is written; note whether it was."""
        if not self._is_in_flight:
            return
        try:
            await self.finish()
        except Exception as error:
            cause = _cause_of(error)
            if not isinstance(cause, CheckpointNotWritten):
                raise
            now_s = asyncio.get_running_loop().time()
            if isinstance(cause, CheckpointLost):
                # No disk is to blame, and the next trainer can write one at once.
                self._turns.lost(now_s)
                return
            self._turns.refused(now_s)
            self._outages.refused(Refusal(path=str(self.folder), reason=str(cause)))
        else:
            self._turns.written()
            self._outages.accepted(str(self.folder))

    async def begin(self, step: int) -> None:
        """Have the trainer begin to write the checkpoint of ``step``, once the one before is written."""
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
        self._is_in_flight = True

    async def finish(self) -> None:
        """Wait until the checkpoint in flight, if any, is written.

        Raises:
            CheckpointNotWritten: it could not be written.
        """
        self._is_in_flight = False
        await self._trainer.finish_checkpoint()

    async def finish_last(self, step: int) -> None:
        """Wait until the last checkpoint of the run is written; one that has failed, until there is room.

        Raises:
            OSError: it cannot be written, although there seems to be room.
        """
        await self._settle()
        num_failures = 0
        while self._turns.is_owed:
            await _until_room(self.folder, self._num_bytes)
            await self.begin(step)
            await self._settle()
            num_failures += 1
            if self._turns.is_owed and num_failures == MAX_FAILURES:
                raise OSError(f"the checkpoint of step {step} cannot be written to {self.folder}")

    async def write_now(self) -> int:
        """Write a checkpoint of a run that was told to stop, wherever it was; returns its step."""
        version = await self._trainer.policy_version()
        if (await self._buffer.snapshot.call_one()).trainer_version < version:
            # The step in flight is complete.
            await self._buffer.committed.call_one(0.0, Update.UNKNOWN)
        await self._settle()
        # It may have been this step's turn anyway, or that of the checkpoint that the run was resumed from.
        if version not in map(step_of, list_checkpoints(self.folder)):
            await self.begin(version)
            await self.finish()
        return version


class Exporter(Protocol):
    """What writes the model."""

    async def save_hf(self, folder: Path, *, source: Path) -> int: ...


async def export(trainer: Exporter, folder: Path, prepared: Prepared, storage: StorageFaults) -> None:
    """Have the trainer write the model to ``folder``, as soon as its disk has room.

    Raises:
        Exception: it cannot be written, although there seems to be room.
    """
    needed = export_bytes(prepared.config, prepared.facts)
    num_failures = 0
    while True:
        try:
            await trainer.save_hf(folder, source=prepared.model_path)
        except Exception as error:
            cause = _cause_of(error)
            if not isinstance(cause, FolderNotWritten):
                raise
            num_failures = num_failures + 1 if _has_room(folder, needed) else 0
            if num_failures == MAX_FAILURES:
                raise
            storage.refused(Refusal(path=str(folder), reason=str(cause)))
            await _until_room(folder, needed)
        else:
            storage.accepted(str(folder))
            return


def _cause_of(error: Exception) -> BaseException:
    """Return what an actor has raised, or the error itself."""
    return error.exception if isinstance(error, ActorError) else error


def _has_room(folder: Path, num_bytes: int) -> bool:
    return shutil.disk_usage(existing_folder(folder)).free >= num_bytes


async def _until_room(folder: Path, num_bytes: int) -> None:
    """Wait for ``WAIT_S``, and for as long as the disk has no room."""
    await asyncio.sleep(WAIT_S)
    while not _has_room(folder, num_bytes):
        await asyncio.sleep(WAIT_S)


class RescuedRun(Protocol):
    """The parts of a run that can be saved."""

    config: RunConfig
    prepared: Prepared
    trainer: TrainerRecovery
    serving: WeightServing
    checkpoints: RunCheckpoints
    first_version: int
    version: int


async def save_newest_weights(run: RescuedRun, run_dir: RunDir, error: BaseException) -> str:
    """Save the newest weights of a run that ends with ``error``; returns where they are, in words."""
    if run.version == run.first_version and run.serving.ledger.newest is None:
        return "no step was made, so that there are no new weights"
    cause = root_cause(error)
    is_lost = isinstance(cause, ActorDied | DeadlineExceeded)
    return await Rescue(run, run_dir.checkpoints.resolve() / LAST).save(
        stop_signal=received_signal(),
        # A trainer may wait for a payload of any host that is lost, for all of timeouts.weights_s.
        trainer_failed=run.trainer.is_stuck
        or isinstance(cause, HostLost)
        or (is_lost and "trainer" in str(cause)),
    )


class Rescue:
    """Saves the newest good weights of a run that ends before its last step, whatever ends it.

    They come from the trainer if it still answers, else from the version that it published last, which is in
    shared memory. A run that SIGTERM stops first writes a checkpoint, if there is time.
    """

    def __init__(self, run: RescuedRun, folder: Path) -> None:
        """Save to ``folder``, which does not exist yet."""
        self.folder = folder
        self._run = run
        self._timeouts = run.config.timeouts

    async def save(self, *, stop_signal: signal.Signals | None, trainer_failed: bool) -> str:
        """Save what can be saved; returns what came of it, for the run's last line. Raises nothing.

        ``stop_signal`` is what told the run to stop. With ``trainer_failed`` the trainer is asked last.
        """
        words = []
        is_urgent = stop_signal is not None or trainer_failed
        key = "timeouts.sigterm_s" if is_urgent else "timeouts.train_step_s"
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._timeouts.sigterm_s
        if stop_signal is signal.SIGTERM and not trainer_failed:
            words.append(await self._try_checkpoint(self._timeouts.sigterm_s / 2))
        ways = [self._from_trainer, self._from_shared_memory]
        if trainer_failed:
            ways.reverse()
        problems = []
        for num_before, way in enumerate(ways):
            # What is urgent has one limit for all of it, so that none takes the time of those behind it.
            left_s = max(0.0, end_s - loop.time()) / (len(ways) - num_before)
            limit_s = left_s if is_urgent else self._timeouts.train_step_s
            try:
                async with deadline(limit_s, call="exporting the newest weights", key=key):
                    return "; ".join([*words, await way()])
            except Exception as error:
                # There may be another way, and the reason that ended the run counts more than this one.
                logger.warning("the newest weights were not saved this way", exc_info=True)
                problems.append(describe_error(error))
                # The next attempt may need the room of unfinished files.
                for name in (LAST, LAST_PUBLISHED):
                    shutil.rmtree(self.folder.with_name(f"{name}.partial"), ignore_errors=True)
        newest = list_checkpoints(self._run.checkpoints.folder)
        kept = f"the newest checkpoint is {newest[-1]}" if newest else "there is no checkpoint"
        return "; ".join([*words, f"the newest weights could not be saved ({', '.join(problems)})", kept])

    async def _try_checkpoint(self, limit_s: float) -> str:
        try:
            async with deadline(limit_s, call="writing a checkpoint", key="timeouts.sigterm_s"):
                return f"--resume latest goes on after step {await self._run.checkpoints.write_now()}"
        except DeadlineExceeded:
            return "there was no time for a checkpoint"
        except Exception as error:
            logger.warning("no checkpoint was written on the way out", exc_info=True)
            return f"no checkpoint could be written ({describe_error(error)})"

    async def _from_trainer(self) -> str:
        version = await self._run.trainer.save_hf(self.folder, source=self._run.prepared.model_path)
        try:
            await self._run.checkpoints.finish()
        except Exception:
            # The weights are saved: what became of the checkpoint does not count against that.
            logger.warning("the checkpoint in flight was not finished", exc_info=True)
        return f"the weights of step {version} are in {self.folder}"

    async def _from_shared_memory(self) -> str:
        newest = self._run.serving.ledger.newest
        if newest is None:
            raise LookupError("no version was published yet")
        if await asyncio.to_thread(self._write_staged, self._run.trainer.staged(newest)):
            return f"the weights of step {newest.version}, as published, are in {self.folder}"
        return f"the trainer's newest weights, exported after its deadline, are in {self.folder}"

    def _write_staged(self, staged: StagedWeights) -> bool:
        """Write a published version; False if the trainer has written its own meanwhile, which is newer."""
        version, prepared, lora = StagedVersion(staged), self._run.prepared, self._run.config.lora
        # The trainer may still be at work on a folder of the final name.
        folder = self.folder.with_name(LAST_PUBLISHED)
        if lora is None:
            writer = HfFolderWriter(folder, source=prepared.model_path)
            for name, tensor in version.tensors():
                writer.add(name, tensor)
            writer.finish()
        else:
            # It imports TorchTitan, which the controller needs for nothing else.
            from forgeasync.trainer import write_folder

            tensors = dict(version.tensors())
            write_folder(tensors, prepared.facts, lora, folder, source=prepared.model_path)
        try:
            folder.rename(self.folder)
        except OSError:
            if not self.folder.is_dir():
                raise
            shutil.rmtree(folder)
            return False
        return True
