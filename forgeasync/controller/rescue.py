"""Saves the weights of a run that ends before its last step, whatever ends it.

The newest good weights go to ``checkpoints/last``: from the trainer, if it still answers, else from the
version that it published last, which lies in shared memory. A run that is told to stop by SIGTERM first
writes a checkpoint, if there is time.
"""

import asyncio
import logging
import shutil
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forgeasync.actors import ActorDied, TrainerRecovery
from forgeasync.checkpoint import LAST, LAST_PUBLISHED, list_checkpoints
from forgeasync.config import LoraSection, ModelFacts, RunConfig, TimeoutSection
from forgeasync.controller.checkpointing import RunCheckpoints
from forgeasync.controller.preparation import Prepared
from forgeasync.controller.serving import WeightServing
from forgeasync.controller.stopping import received_signal
from forgeasync.launch import HostLost
from forgeasync.models import HfFolderWriter
from forgeasync.observability import RunDir, last_words, root_cause
from forgeasync.waiting import DeadlineExceeded, deadline
from forgeasync.weights import StagedVersion, StagedWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """The source of a run's newest weights, and the folder to save them to."""

    folder: Path
    """Folder for the weights, which does not exist yet."""
    checkpoints: Path
    source: Path
    """The model that the run started from."""
    facts: ModelFacts
    lora: LoraSection | None
    timeouts: TimeoutSection
    export: Callable[[Path], Awaitable[int]]
    """Lets the trainer write a folder; returns the version that it wrote."""
    checkpoint: Callable[[], Awaitable[int]]
    """Lets the trainer write a checkpoint; returns the step that it is of."""
    staged: StagedWeights | None
    """The version published last; None before the first."""

    async def save(self, *, stop_signal: signal.Signals | None, trainer_failed: bool) -> str:
        """Save what can be saved; what came of it, in words for the run's last line. Raises nothing.

        ``stop_signal`` is what told the run to stop. Where ``trainer_failed``, the trainer is asked last.
        """
        words = []
        is_urgent = stop_signal is not None or trainer_failed
        key = "timeouts.sigterm_s" if is_urgent else "timeouts.train_step_s"
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self.timeouts.sigterm_s
        if stop_signal is signal.SIGTERM and not trainer_failed:
            words += await self._try_checkpoint(self.timeouts.sigterm_s / 2)
        ways = [self._from_trainer, self._from_shared_memory]
        if trainer_failed:
            ways.reverse()
        problems = []
        for num_before, way in enumerate(ways):
            # What is urgent has one limit for all of it, so that none takes the time of those behind it.
            left_s = max(0.0, end_s - loop.time()) / (len(ways) - num_before)
            limit_s = left_s if is_urgent else self.timeouts.train_step_s
            try:
                async with deadline(limit_s, call="exporting the newest weights", key=key):
                    return "; ".join([*words, await way()])
            except Exception as error:
                # There may be another way, and the reason that ended the run counts more than this one.
                logger.warning("the newest weights were not saved this way", exc_info=True)
                problems.append(last_words(error))
                self._remove_partial()
        newest = list_checkpoints(self.checkpoints)
        kept = f"the newest checkpoint is {newest[-1]}" if newest else "there is no checkpoint"
        return "; ".join([*words, f"the newest weights could not be saved ({', '.join(problems)})", kept])

    async def _try_checkpoint(self, limit_s: float) -> list[str]:
        try:
            async with deadline(limit_s, call="writing a checkpoint", key="timeouts.sigterm_s"):
                return [f"--resume latest goes on after step {await self.checkpoint()}"]
        except DeadlineExceeded:
            return ["there was no time for a checkpoint"]
        except Exception as error:
            logger.warning("no checkpoint was written on the way out", exc_info=True)
            return [f"no checkpoint could be written ({last_words(error)})"]

    def _remove_partial(self) -> None:
        """Remove unfinished files, whose room the next attempt may need."""
        for name in (LAST, LAST_PUBLISHED):
            shutil.rmtree(self.folder.with_name(f"{name}.partial"), ignore_errors=True)

    async def _from_trainer(self) -> str:
        version = await self.export(self.folder)
        return f"the weights of step {version} are in {self.folder}"

    async def _from_shared_memory(self) -> str:
        if self.staged is None:
            raise LookupError("no version was published yet")
        if await asyncio.to_thread(self._write_staged, self.staged):
            return f"the weights of step {self.staged.manifest.version}, as published, are in {self.folder}"
        return f"the trainer's newest weights, exported after its deadline, are in {self.folder}"

    def _write_staged(self, staged: StagedWeights) -> bool:
        """Write a published version; False if the trainer has written its own meanwhile, which is newer."""
        version = StagedVersion(staged)
        # The trainer may still be at work on a folder of the final name.
        folder = self.folder.with_name(LAST_PUBLISHED)
        if self.lora is None:
            writer = HfFolderWriter(folder, source=self.source)
            for name, tensor in version.tensors():
                writer.add(name, tensor)
            writer.finish()
        else:
            # Imports TorchTitan, which the controller needs for nothing else.
            from forgeasync.trainer import write_folder

            write_folder(dict(version.tensors()), self.facts, self.lora, folder, source=self.source)
        try:
            folder.rename(self.folder)
        except OSError:
            if not self.folder.is_dir():
                raise
            shutil.rmtree(folder)
            return False
        return True


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
    """Have the newest weights of a run that ends with ``error`` exported; where they are, in words."""
    newest = run.serving.ledger.newest
    if run.version == run.first_version and newest is None:
        return "no step was made, so that there are no new weights"
    cause = root_cause(error)

    async def export(folder: Path) -> int:
        version = await run.trainer.save_hf(folder, source=run.prepared.model_path)
        try:
            await run.checkpoints.finish()
        except Exception:
            # The weights are saved: what became of the checkpoint does not count against that.
            logger.warning("the checkpoint under way was not finished", exc_info=True)
        return version

    rescue = Rescue(
        folder=run_dir.checkpoints.resolve() / LAST,
        checkpoints=run.checkpoints.folder,
        source=run.prepared.model_path,
        facts=run.prepared.facts,
        lora=run.config.lora,
        timeouts=run.config.timeouts,
        export=export,
        checkpoint=run.checkpoints.write_now,
        staged=None if newest is None else run.trainer.staged(newest),
    )
    is_lost = isinstance(cause, ActorDied | DeadlineExceeded)
    return await rescue.save(
        stop_signal=received_signal(),
        # A trainer may wait for a payload of any host that is lost, for all of timeouts.weights_s.
        trainer_failed=run.trainer.is_stuck
        or isinstance(cause, HostLost)
        or (is_lost and "trainer" in str(cause)),
    )
