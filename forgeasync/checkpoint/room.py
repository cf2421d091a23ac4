"""How large a checkpoint is, and whether the disk has room for one."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from forgeasync.config.checkpoint_shapes import expected_shapes
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.problems import Problem
from forgeasync.config.schema import RunConfig
from forgeasync.config.sizes import num_adapter_parameters

BYTES_PER_PARAMETER = 12
"""A float32 parameter and AdamW's two moments of it."""

OVERHEAD_BYTES = 8192
"""Of one tensor of the model, generously: names, headers and the step counts of its optimizer."""


def checkpoint_bytes(config: RunConfig, facts: ModelFacts) -> int:
    """About what one checkpoint takes on the disk, rather more than less."""
    shapes = expected_shapes(facts)
    if config.lora is None:
        num_trained = sum(math.prod(shape) for shape in shapes.values())
    else:
        num_trained = num_adapter_parameters(facts, config.lora)
    return BYTES_PER_PARAMETER * num_trained + OVERHEAD_BYTES * len(shapes)


def check_room(config: RunConfig, facts: ModelFacts, folder: Path) -> Iterator[Problem]:
    """Whether one more checkpoint fits where they are written."""
    if config.checkpoint.every_steps is None:
        return
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    needed, free = checkpoint_bytes(config, facts), shutil.disk_usage(existing).free
    if needed > free:
        yield Problem(
            field="checkpoint.folder",
            value=str(folder),
            remedy=f"a checkpoint takes {needed / 2**30:.3g} GiB and {existing} has {free / 2**30:.3g} GiB "
            "free; make room, name another folder or set checkpoint.every_steps to null",
        )
