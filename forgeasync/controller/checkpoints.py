"""Saves checkpoints, the trained model, and the newest weights of a run that fails.

    RunCheckpoints         checkpoints: the trainer's arrays and the controller's state after the same step
    export                 the trained model, in ``checkpoints/final``
    save_newest_weights    the newest good weights of a run that ends early, in ``checkpoints/last``

A full disk does not end a run: a checkpoint or export that cannot be written is tried again.
"""

import asyncio
import logging
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import ActorError

from forgeasync.buffer import ReplayBuffer, Update
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
from forgeasync.config import LoraSection, ModelFacts, load_config
from forgeasync.controller.cli import received_signal
from forgeasync.controller.preparation import Prepared
from forgeasync.controller.recorder import Part, RunRecorder, StepTimes
from forgeasync.environments import digest_of
from forgeasync.files import Refusal
from forgeasync.models import FolderNotWritten, HfFolderWriter, model_folder, read_model_facts
from forgeasync.observability import FaultLog, RunDir, StorageFaults, describe_error, root_cause
from forgeasync.runtime import ActorDied, HostLost, RemoteBuffer, TrainerRecovery
from forgeasync.schema import ConfigError, Problem
from forgeasync.waiting import DeadlineExceeded, deadline
from forgeasync.weights import (
    ArchiveUnreadable,
    StagedVersion,
    StagedWeights,
    WeightSet,
    read_version,
    whole_tensors,
)

if TYPE_CHECKING:
    import torch

    from forgeasync.controller.run import RunLoops

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""Seconds from a failed write of a checkpoint to the retry, which begins after the next step."""

WAIT_S = 2.0
"""Seconds between attempts to write the last checkpoint or the export, and between checks for free space."""

MAX_FAILURES = 3
"""Failures with enough free space after which the last checkpoint or the export ends the run."""


class RunCheckpoints:
    """Writes the checkpoints of a run to a folder while training continues.

    A checkpoint is due every ``checkpoint.every_steps`` steps and after the last step. If one cannot be
    written, it is removed and reported, and another one begins after a later step. The outage stays open
    until that one is complete. It is a fault separate from those of files that training waits for.
    """

    def __init__(
        self,
        folder: Path,
        prepared: Prepared,
        *,
        trainer: TrainerRecovery,
        buffer: RemoteBuffer,
        recorder: RunRecorder,
        storage: StorageFaults,
        faults: FaultLog,
    ) -> None:
        """``storage`` tracks outages of the files that training waits for."""
        self.folder = folder
        self._prepared = prepared
        self._trainer = trainer
        self._buffer = buffer
        self._recorder = recorder
        self._storage = storage
        self._problems = digest_of(prepared.train)
        self._outages = StorageFaults(faults)
        self._num_bytes = checkpoint_bytes(prepared.config, prepared.facts)
        self._is_in_flight = False
        self._retry_at_s: float | None = None
        """Time from which another attempt can begin; None if the last one that was begun is written."""

    async def after_step(self, step: int, times: StepTimes) -> None:
        """Begin a checkpoint after ``step`` if one is due; add the time until it has begun to ``times``."""
        if await self._is_due(step):
            waited_s = self._storage.waited_s
            with times.part(Part.CHECKPOINT):
                await self.begin(step)
            times.move(self._storage.waited_s - waited_s, Part.CHECKPOINT, Part.DISK)

    async def _is_due(self, step: int) -> bool:
        """Return whether to begin a checkpoint after ``step``: one is due, or a failed one can be retried."""
        if self._is_in_flight and not await self._trainer.is_writing_checkpoint():
            await self._settle()
        config = self._prepared.config
        every_steps = config.checkpoint.every_steps
        if every_steps is not None and (step % every_steps == 0 or step == config.max_steps):
            return True
        if self._is_in_flight or self._retry_at_s is None:
            return False
        is_time = asyncio.get_running_loop().time() >= self._retry_at_s
        return is_time and _has_room(self.folder, self._num_bytes)

    async def _settle(self) -> None:
        """Wait for the checkpoint in flight, if any, and record whether it was written."""
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
                # The disk is not at fault; the restarted trainer can write one immediately.
                self._retry_at_s = now_s
                return
            self._retry_at_s = now_s + RETRY_S
            self._outages.refused(Refusal(path=str(self.folder), reason=str(cause)))
        else:
            self._retry_at_s = None
            self._outages.accepted(str(self.folder))

    async def begin(self, step: int) -> None:
        """Begin writing the checkpoint of ``step``, after the previous one has finished."""
        await self._settle()
        config = self._prepared.config
        # The ledger must be on the disk before a checkpoint that refers to it.
        buffer = await self._storage.while_waiting(self._buffer.checkpoint(), self._buffer.refusal)
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
            CheckpointNotWritten: the checkpoint could not be written.
        """
        self._is_in_flight = False
        await self._trainer.finish_checkpoint()

    async def finish_last(self, step: int) -> None:
        """Wait until the last checkpoint of the run is written; retry a failed one once there is free space.

        Raises:
            OSError: ``MAX_FAILURES`` retries failed although there seemed to be enough free space.
        """
        await self._settle()
        num_failures = 0
        while self._retry_at_s is not None:
            if num_failures == MAX_FAILURES:
                raise OSError(f"the checkpoint of step {step} cannot be written to {self.folder}")
            await _until_room(self.folder, self._num_bytes)
            await self.begin(step)
            await self._settle()
            num_failures += 1

    async def write_now(self) -> int:
        """Write a checkpoint of a run that is stopping, at any point of a step; return its step."""
        version = await self._trainer.policy_version()
        if (await self._buffer.change(ReplayBuffer.snapshot)).trainer_version < version:
            # The trainer has completed a step that the buffer does not know yet.
            await self._buffer.change(ReplayBuffer.committed, trainer_wait_share=0.0, update=Update.UNKNOWN)
        await self._settle()
        # This version may have its checkpoint: a regular one, or the one that the run was resumed from.
        if version not in map(step_of, list_checkpoints(self.folder)):
            await self.begin(version)
            await self.finish()
        return version


async def export(trainer: TrainerRecovery, folder: Path, prepared: Prepared, storage: StorageFaults) -> None:
    """Write the trained model to ``folder``; if its disk is full, wait for free space and retry.

    Raises:
        Exception: ``MAX_FAILURES`` attempts failed although there seemed to be enough free space.
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
    """Return the exception inside an ``ActorError``, or the error itself."""
    return error.exception if isinstance(error, ActorError) else error


def _has_room(folder: Path, num_bytes: int) -> bool:
    return shutil.disk_usage(existing_folder(folder)).free >= num_bytes


async def _until_room(folder: Path, num_bytes: int) -> None:
    """Wait for ``WAIT_S``, then until the disk has ``num_bytes`` free."""
    await asyncio.sleep(WAIT_S)
    while not _has_room(folder, num_bytes):
        await asyncio.sleep(WAIT_S)


async def save_newest_weights(run: "RunLoops", run_dir: RunDir, error: BaseException) -> str:
    """Save the newest weights of a run that ends with ``error``; return a message with their location."""
    if run.version == run.first_version and run.serving.ledger.newest is None:
        return "no step was made, so that there are no new weights"
    cause = root_cause(error)
    is_lost = isinstance(cause, ActorDied | DeadlineExceeded)
    return await Rescue(run, run_dir.checkpoints.resolve() / LAST).save(
        stop_signal=received_signal(),
        # After the loss of a host the trainer may wait for one of its payloads for up to timeouts.weights_s.
        trainer_failed=run.trainer.is_stuck
        or isinstance(cause, HostLost)
        or (is_lost and "trainer" in str(cause)),
    )


class Rescue:
    """Saves the newest good weights of a run that ends before its last step, for any reason.

    The weights come from the trainer if it still answers, otherwise from the last published version, which is
    in shared memory. A run stopped by Ctrl-C or SIGTERM first writes a checkpoint, if there is time.
    """

    def __init__(self, run: "RunLoops", folder: Path) -> None:
        """Save to ``folder``, which must not exist yet."""
        self.folder = folder
        self._run = run
        self._timeouts = run.config.timeouts

    async def save(self, *, stop_signal: signal.Signals | None, trainer_failed: bool) -> str:
        """Save a checkpoint and the weights, as far as possible; return the outcome for the run's last line.

        No ``Exception`` is raised. ``stop_signal`` is the signal that stopped the run, if any. With
        ``trainer_failed`` the published version in shared memory is tried before the trainer.
        """
        words = []
        is_urgent = stop_signal is not None or trainer_failed
        key = "timeouts.sigterm_s" if is_urgent else "timeouts.train_step_s"
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._timeouts.sigterm_s
        if stop_signal is not None and not trainer_failed:
            words.append(await self._try_checkpoint(self._timeouts.sigterm_s / 2))
        ways = [self._from_trainer, self._from_shared_memory]
        if trainer_failed:
            ways.reverse()
        problems = []
        for num_before, way in enumerate(ways):
            # Urgent saves share one limit, so that a slow attempt leaves time for the next one.
            left_s = max(0.0, end_s - loop.time()) / (len(ways) - num_before)
            limit_s = left_s if is_urgent else self._timeouts.train_step_s
            try:
                async with deadline(limit_s, call="exporting the newest weights", key=key):
                    return "; ".join([*words, await way()])
            except Exception as error:
                # The other source may work, and the error that ended the run matters more than this one.
                logger.warning("the newest weights were not saved this way", exc_info=True)
                problems.append(describe_error(error))
                # The next attempt may need the space that unfinished files occupy.
                for name in (LAST, LAST_PUBLISHED):
                    shutil.rmtree(self.folder.with_name(f"{name}.partial"), ignore_errors=True)
        newest = list_checkpoints(self._run.checkpoints.folder)
        kept = f"the newest checkpoint is {newest[-1]}" if newest else "there is no checkpoint"
        return "; ".join([*words, f"the newest weights could not be saved ({', '.join(problems)})", kept])

    async def _try_checkpoint(self, limit_s: float) -> str:
        try:
            async with deadline(limit_s, call="writing a checkpoint", key="timeouts.sigterm_s"):
                return f"--resume latest continues after step {await self._run.checkpoints.write_now()}"
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
            # The weights are saved, even if the checkpoint failed.
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
        """Write a published version; return False if the trainer has meanwhile written its own, newer one."""
        prepared = self._run.prepared
        # The trainer may still be writing the folder with the final name.
        folder = self.folder.with_name(LAST_PUBLISHED)
        _write_weights(
            StagedVersion(staged).tensors(),
            folder,
            source=prepared.model_path,
            facts=prepared.facts,
            lora=self._run.config.lora,
        )
        try:
            folder.rename(self.folder)
        except OSError:
            if not self.folder.is_dir():
                raise
            shutil.rmtree(folder)
            return False
        return True


def _write_weights(
    tensors: "Iterable[tuple[str, torch.Tensor]]",
    folder: Path,
    *,
    source: Path,
    facts: ModelFacts,
    lora: LoraSection | None,
) -> None:
    """Write published tensors as a Hugging Face folder, or those of adapters as a peft folder."""
    if lora is None:
        writer = HfFolderWriter(folder, source=source, facts=facts)
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.finish()
    else:
        # Imported here because it imports TorchTitan, which the controller does not otherwise need.
        from forgeasync.trainer import write_folder

        own = {name: tensor.clone() for name, tensor in tensors}
        write_folder(own, facts, lora, folder, source=source)


def export_version(run: Path, version: int) -> Path:
    """Write a version of ``weights.archive``, as generators got it, to ``checkpoints/version-N``.

    Returns that folder.

    Raises:
        ConfigError: The archive does not have the version whole, or the folder exists.
    """
    run_dir = RunDir(path=run)
    folder = run_dir.checkpoints / f"version-{version}"
    if folder.exists():
        raise ConfigError([Problem(field="--version", value=version, remedy=f"is in {folder} already")])
    try:
        layout, images = read_version(run_dir.versions, version)
    except ArchiveUnreadable as error:
        raise ConfigError([Problem(field="--version", value=version, remedy=str(error))]) from None
    config = load_config([run_dir.config])
    _write_weights(
        whole_tensors(layout.of(WeightSet.POLICY), images),
        folder,
        source=model_folder(config.model.path).resolve(),
        facts=read_model_facts(config.model.path),
        lora=config.lora,
    )
    return folder
