"""Exports the trained model, and waits for room where the disk has none."""

import asyncio
import shutil
from pathlib import Path
from typing import Protocol

from monarch.actor import ActorError

from forgeasync.checkpoint import existing_folder, export_bytes
from forgeasync.controller.preparation import Prepared
from forgeasync.faults import Refusal, StorageFaults
from forgeasync.models import FolderNotWritten

WAIT_S = 2.0
"""Seconds between two attempts, and between two looks for room."""

MAX_FAILURES = 3
"""An export that fails so often, although there seems to be room, ends the run."""


class Exporter(Protocol):
    """What writes the model."""

    async def save_hf(self, folder: Path, *, source: Path) -> int: ...


def cause_of(error: Exception) -> BaseException:
    """Return what an actor has raised, or the error itself."""
    return error.exception if isinstance(error, ActorError) else error


async def export(trainer: Exporter, folder: Path, prepared: Prepared, storage: StorageFaults) -> None:
    """Have the trainer write the model to ``folder``, as soon as its disk has room.

    Raises:
        Exception: it cannot be written, although there seems to be room.
    """
    needed = export_bytes(prepared.config, prepared.facts)
    path = str(folder)
    num_failures = 0
    while True:
        try:
            await trainer.save_hf(folder, source=prepared.model_path)
        except Exception as error:
            cause = cause_of(error)
            if not isinstance(cause, FolderNotWritten):
                raise
            has_room = shutil.disk_usage(existing_folder(folder)).free >= needed
            num_failures = num_failures + 1 if has_room else 0
            if num_failures == MAX_FAILURES:
                raise
            storage.refused(Refusal(path=path, reason=str(cause)))
            await asyncio.sleep(WAIT_S)
            while shutil.disk_usage(existing_folder(folder)).free < needed:
                await asyncio.sleep(WAIT_S)
        else:
            storage.accepted(path)
            return
