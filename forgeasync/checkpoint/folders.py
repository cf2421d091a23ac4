"""Folders of checkpoints: how they are named, and how one comes into being all at once.

    step-00000040/trainer/    model, optimizer and random state, by torch.distributed.checkpoint
    step-00000040/run.json    what the controller has to know (``forgeasync.checkpoint.run_state``)
    step-00000060.tmp/        being written, or left behind by a run that died in doing so
    final/, last/             an exported model

The rename is the last thing that happens, after every file and folder was flushed to the disk: a folder
without ``.tmp`` is whole.
"""

import os
import re
import shutil
from pathlib import Path

from forgeasync.faults import flush

TRAINER_FOLDER = "trainer"
RUN_FILE = "run.json"
PARTIAL_SUFFIX = ".tmp"

FINAL = "final"
"""The exported model of a run that has made all of its steps."""
LAST = "last"
"""The newest weights of a run that has not."""
LAST_PUBLISHED = "last-published"
"""Name of the folder that becomes ``LAST`` if the trainer cannot write it."""

_NAME = re.compile(r"step-(\d{8,})")


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written; nothing of it is left, and another one can be begun."""


class CheckpointLost(CheckpointNotWritten):
    """The trainer was lost that was writing it, and no other one can write it again."""


def checkpoint_name(step: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step of a whole checkpoint by its folder's name; None if that is no such name."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[1])


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint is all written and shown."""
    return (folder / RUN_FILE).is_file()


def list_checkpoints(parent: Path) -> list[Path]:
    """Whole checkpoints, the oldest step first; none if there is no such folder."""
    if not parent.is_dir():
        return []
    steps = {folder: step_of(folder) for folder in parent.iterdir() if is_whole(folder)}
    found = [(step, folder) for folder, step in steps.items() if step is not None]
    return [folder for _, folder in sorted(found)]


def sweep_partial(parent: Path) -> list[str]:
    """Remove what runs that died have left half-written; its names."""
    partial = sorted(parent.glob(f"step-*{PARTIAL_SUFFIX}"))
    for folder in partial:
        shutil.rmtree(folder)
    return [folder.name for folder in partial]


def partial_folder(folder: Path) -> Path:
    """Return the folder of a checkpoint while it is being written."""
    return folder.with_name(folder.name + PARTIAL_SUFFIX)


def remove_partial(folder: Path) -> None:
    """Remove what there is of a checkpoint that nobody writes any more, and of no other one."""
    shutil.rmtree(partial_folder(folder), ignore_errors=True)


def publish(folder: Path, run_state: bytes) -> None:
    """Add the controller's part to a checkpoint whose other files are flushed, and show it."""
    partial = partial_folder(folder)
    with (partial / RUN_FILE).open("wb") as file:
        file.write(run_state)
        file.flush()
        os.fsync(file.fileno())
    flush(partial / TRAINER_FOLDER)
    flush(partial)
    partial.rename(folder)
    flush(folder.parent)


def prune(parent: Path, *, keep: int) -> None:
    """Remove all checkpoints but the newest ones."""
    for folder in list_checkpoints(parent)[:-keep]:
        # A removal that is cut short must not leave a folder that looks whole.
        partial = partial_folder(folder)
        folder.rename(partial)
        shutil.rmtree(partial)
