"""What is saved of a run that ends before its last step, whatever ends it.

The newest good weights go to ``checkpoints/last``: from the trainer, if it still answers, else from the version
that it published last, which lies in shared memory. A run that is told to stop (SIGTERM) first writes a
checkpoint too.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forgeasync.actors.deadline import deadline
from forgeasync.checkpoint.folders import list_checkpoints
from forgeasync.checkpoint.hf_folder import HfFolderWriter
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import LoraSection, TimeoutSection
from forgeasync.weights.layout import WeightLayout
from forgeasync.weights.manifest import Manifest
from forgeasync.weights.staged_version import StagedVersion
from forgeasync.weights.transports.transport import StagingSource

logger = logging.getLogger(__name__)

LAST = "last"
"""Folder in ``checkpoints`` with the newest weights of a run that did not come to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The version published last, and where it lies."""

    manifest: Manifest
    layout: WeightLayout
    sources: Sequence[StagingSource]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """Where weights can be had from once a run has failed, and where they go."""

    folder: Path
    """Does not exist yet."""
    checkpoints: Path
    source: Path
    """The model that the run started from."""
    facts: ModelFacts
    lora: LoraSection | None
    timeouts: TimeoutSection
    export: Callable[[Path], Awaitable[int]]
    """Has the trainer write a folder; the version that it wrote."""
    checkpoint: Callable[[], Awaitable[int]]
    """Writes a checkpoint of the present step; which step that is."""
    staged: Staged | None
    """None where nothing was published yet."""

    async def run(self, *, stop_signal: signal.Signals | None, trainer_failed: bool) -> str:
        """Save what can be saved; what came of it, in words.

        ``stop_signal`` is what a run was told to stop by. Where ``trainer_failed``, the trainer is asked last.
        """
        messages = []
        if stop_signal is signal.SIGTERM and not trainer_failed:
            messages.append(await self._try_checkpoint())
        from_trainer, from_memory = self._from_trainer, self._from_shared_memory
        is_urgent = stop_signal is not None or trainer_failed
        limit_s, key = self.timeouts.train_step_s, "timeouts.train_step_s"
        if is_urgent:
            limit_s, key = self.timeouts.sigterm_s, "timeouts.sigterm_s"
        ways = [from_memory, from_trainer] if trainer_failed else [from_trainer, from_memory]
        for way in ways:
            try:
                async with deadline(limit_s, call="exporting the newest weights", key=key):
                    messages.append(await way())
                return "; ".join(filter(None, messages))
            except Exception as error:
                # Whatever it is, there may be another way, and the reason that ended the run counts more.
                logger.warning("the newest weights were not saved", exc_info=True)
                messages.append(f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}")
        newest = list_checkpoints(self.checkpoints)
        kept = f"the newest checkpoint is {newest[-1]}" if newest else "there is no checkpoint"
        return f"the newest weights could not be saved ({'; '.join(filter(None, messages))}); {kept}"

    async def _try_checkpoint(self) -> str | None:
        limit_s = self.timeouts.sigterm_s
        try:
            async with deadline(limit_s, call="writing a checkpoint", key="timeouts.sigterm_s"):
                return f"go on after step {await self.checkpoint()} with --resume latest"
        except Exception:
            logger.warning("no checkpoint was written on the way out", exc_info=True)
            return None

    async def _from_trainer(self) -> str:
        version = await self.export(self.folder)
        return f"the weights of step {version} are in {self.folder}"

    async def _from_shared_memory(self) -> str:
        if self.staged is None:
            raise LookupError("no version was published yet")
        version = self.staged.manifest.version
        await asyncio.to_thread(write_staged, self.staged, self)
        return f"the weights of step {version}, as they were published, are in {self.folder}"


def write_staged(staged: Staged, rescue: Rescue) -> None:
    """Write a published version as the folder of ``rescue``.

    Raises:
        VersionUnreadable: it cannot be read from here, or is damaged.
    """
    version = StagedVersion(staged.layout, staged.sources, staged.manifest)
    if rescue.lora is not None:
        # Imports TorchTitan, which the controller needs for nothing else.
        from forgeasync.trainer.lora_checkpoint import write_folder

        write_folder(
            dict(version.tensors()), rescue.facts, rescue.lora, rescue.folder, source=rescue.source
        )
        return
    writer = HfFolderWriter(rescue.folder, source=rescue.source)
    for name, tensor in version.tensors():
        writer.add(name, tensor)
    writer.finish()
