"""Folders of checkpoints: their names, how one comes into being all at once, and their size on the disk.

    step-00000040/trainer/    model, optimizer and random state, by torch.distributed.checkpoint
    step-00000040/run.json    what the controller has to know (``forgeasync.trainer.run_state``)
    step-00000060.tmp/        being written, or left behind by a run that died while writing
    final/, last/             an exported model

The rename is the last thing that happens, after every file and folder was flushed to the disk: a folder
without ``.tmp`` is whole.
"""

import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from forgeasync.config import EXPERT_TARGETS, ModelFacts, RunConfig, num_averages
from forgeasync.files import flush
from forgeasync.models import expected_shapes, num_adapter_parameters
from forgeasync.schema import Problem

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
    """A checkpoint could not be written. Nothing of it is left, and another one can be begun."""


class CheckpointLost(CheckpointNotWritten):
    """The trainer that was writing a checkpoint was lost, and no other one can write it again."""


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step of a whole checkpoint by its folder's name; None: it is not the name of one."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[1])


def is_whole(folder: Path) -> bool:
    """Return whether all of a checkpoint is written."""
    return (folder / RUN_FILE).is_file()


def list_checkpoints(parent: Path) -> list[Path]:
    """Return the whole checkpoints in a folder, the oldest step first; none if there is no such folder."""
    if not parent.is_dir():
        return []
    steps = {folder: step_of(folder) for folder in parent.iterdir() if is_whole(folder)}
    found = [(step, folder) for folder, step in steps.items() if step is not None]
    return [folder for _, folder in sorted(found)]


def sweep_partial(parent: Path) -> list[str]:
    """Remove checkpoints that runs which died have left half-written; returns their names."""
    partial = sorted(parent.glob(f"step-*{PARTIAL_SUFFIX}"))
    for folder in partial:
        shutil.rmtree(folder)
    return [folder.name for folder in partial]


def partial_folder(folder: Path) -> Path:
    """Return the folder of a checkpoint while it is being written."""
    return folder.with_name(folder.name + PARTIAL_SUFFIX)


def remove_partial(folder: Path) -> None:
    """Remove what was written of one checkpoint that nobody writes any more."""
    shutil.rmtree(partial_folder(folder), ignore_errors=True)


def publish(folder: Path, run_state: bytes) -> None:
    """Add the controller's part to a checkpoint whose other files are flushed, and give it its final name."""
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


FLOAT32_BYTES = 4

BYTES_PER_PARAMETER = 3 * FLOAT32_BYTES
"""A float32 parameter and AdamW's two moments of it."""

EXPORT_OVERHEAD_BYTES = 1024
"""Bytes of one exported tensor's name in header and index, generously."""

OVERHEAD_BYTES = 8192
"""Generous bound on one tensor's overhead: names, headers and the step counts of its optimizer."""


def checkpoint_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return about how many bytes a checkpoint takes on the disk, rather more than less."""
    shapes = expected_shapes(facts)
    if config.lora is None:
        num_trained = sum(math.prod(shape) for shape in shapes.values())
    else:
        num_trained = num_adapter_parameters(facts, config.lora)
    of_parameter = BYTES_PER_PARAMETER + FLOAT32_BYTES * num_averages(config.teachers)
    return of_parameter * num_trained + OVERHEAD_BYTES * len(shapes)


def export_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """Return about how many bytes the trained model takes on the disk in float32, rather more than less."""
    shapes = expected_shapes(facts)
    overhead = EXPORT_OVERHEAD_BYTES * len(shapes)
    if config.lora is None:
        return FLOAT32_BYTES * sum(math.prod(shape) for shape in shapes.values()) + overhead
    # For experts, all three projections are written.
    targets = set(config.lora.targets)
    if targets & set(EXPERT_TARGETS):
        targets |= set(EXPERT_TARGETS)
    whole = config.lora.model_copy(update={"targets": tuple(targets)})
    return FLOAT32_BYTES * num_adapter_parameters(facts, whole) + overhead


def check_room(config: RunConfig, facts: ModelFacts, *, checkpoints: Path, export: Path) -> Iterator[Problem]:
    """Find disks without room for what a run keeps at a time: the exported model and checkpoints.

    A checkpoint is whole before the oldest is removed, so there is one more than ``checkpoint.keep`` for a
    while.
    """
    one = checkpoint_bytes(config, facts)
    num_more = 0
    if config.checkpoint.every_steps is not None:
        # The last step has one too.
        num_ever = math.ceil(config.max_steps / config.checkpoint.every_steps)
        num_left = min(config.checkpoint.keep + 1, num_ever) - len(list_checkpoints(checkpoints))
        num_more = max(1, num_left)
    exported = export_bytes(config, facts)
    at_export, at_checkpoints = existing_folder(export), existing_folder(checkpoints)
    is_shared = at_export.stat().st_dev == at_checkpoints.stat().st_dev
    free = shutil.disk_usage(at_export).free
    needed = exported + (num_more * one if is_shared else 0)
    if needed > free:
        and_checkpoints = (
            f" and {num_more} checkpoints {_gib(num_more * one)} GiB" if is_shared and num_more else ""
        )
        yield Problem(
            field="run_dir",
            value=config.run_dir,
            remedy=f"the trained model takes {_gib(exported)} GiB{and_checkpoints}, and {at_export} has "
            f"{_gib(free)} GiB free; make room, name another folder, or keep fewer checkpoints "
            "(checkpoint.keep, checkpoint.every_steps)",
        )
    free = shutil.disk_usage(at_checkpoints).free
    if not is_shared and num_more * one > free:
        yield Problem(
            field="checkpoint.folder",
            value=str(checkpoints),
            remedy=f"{num_more} checkpoints take {_gib(num_more * one)} GiB and {at_checkpoints} has "
            f"{_gib(free)} GiB free; make room, name another folder or keep fewer (checkpoint.keep)",
        )


def existing_folder(folder: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"
