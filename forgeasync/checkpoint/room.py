"""Computes the sizes of checkpoints and the exported model, and checks that the disk has room for them."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from forgeasync.checkpoint.folders import list_checkpoints
from forgeasync.config import EXPERT_TARGETS, ModelFacts, RunConfig, num_averages
from forgeasync.models import expected_shapes, num_adapter_parameters
from forgeasync.schema import Problem

FLOAT32_BYTES = 4

BYTES_PER_PARAMETER = 3 * FLOAT32_BYTES
"""A float32 parameter and AdamW's two moments of it."""

EXPORT_OVERHEAD_BYTES = 1024
"""Bytes of one exported tensor's name in header and index, generously."""

OVERHEAD_BYTES = 8192
"""Generous bound on one tensor's overhead: names, headers and the step counts of its optimizer."""


def checkpoint_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """About what one checkpoint takes on the disk, rather more than less."""
    shapes = expected_shapes(facts)
    if config.lora is None:
        num_trained = sum(math.prod(shape) for shape in shapes.values())
    else:
        num_trained = num_adapter_parameters(facts, config.lora)
    of_parameter = BYTES_PER_PARAMETER + FLOAT32_BYTES * num_averages(config.teachers)
    return of_parameter * num_trained + OVERHEAD_BYTES * len(shapes)


def export_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """About what the trained model takes on the disk in float32, rather more than less."""
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
    """Whether what a run keeps at a time fits where it is written.

    That is the exported model and checkpoints. A checkpoint is whole before the oldest is removed: there is
    one more than ``checkpoint.keep`` for a while.
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
    """The folder itself, or the nearest one above it that is there."""
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"
