"""Faults in the middle of what a trainer rank does, each once: by a condition, not by a clock."""

import ctypes
import dataclasses
import math
import os
import signal
import time
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forgeasync.algorithms import Loss, RowLoss, RowTokens
from forgeasync.schema import Section
from tests.support.processes import wait_until

ANSWERED = ".answered"
"""Ends the name of the file, begun with a step's number, that says that its answer has come."""


class Moment(StrEnum):
    """What the rank does when it happens."""

    ROW = "row"
    """The forward pass is done, the backward pass is not: other ranks go into collectives."""
    SNAPSHOT = "snapshot"
    """All of the step's snapshot is written but for its header, and the step has been answered."""
    STAGING = "staging"
    """The step's weights are being copied into a staging buffer."""
    CHECKPOINT = "checkpoint"
    """A checkpoint is being written."""


class Way(StrEnum):
    """What happens."""

    KILL = "kill"
    EXIT = "exit"
    SEGFAULT = "segfault"
    STOP = "stop"
    HANG = "hang"
    """A collective that never ends: the rank does not come to it."""


class TrainerFault(Section):
    """One fault; ``step`` counts from 1."""

    step: int
    rank: int = 1
    moment: Moment = Moment.ROW
    way: Way = Way.KILL


class FaultyLoss(Loss):
    """The loss of ``Loss``; brings faults about in its process, each once in a run.

    Every rank has one row in each step, and steps are counted from a process's start.
    """

    faults: tuple[TrainerFault, ...]
    marks: str
    """Folder that remembers what has happened."""
    spoiled_steps: tuple[int, ...] = ()
    """The loss of the second rank is nan in these, always."""

    def __call__(self, tokens: RowTokens, *, total: float) -> RowLoss:
        for fault in self.faults:
            if fault.rank == dist.get_rank() and fault.step == _next_step():
                _bring_about(fault, Path(self.marks) / f"{fault.step}-{fault.moment}-{fault.way}")
        result = super().__call__(tokens, total=total)
        if dist.get_rank() == 1 and self.spoiled_steps and _next_step() in self.spoiled_steps:
            return dataclasses.replace(result, loss=result.loss * math.nan)
        return result


def _next_step() -> int:
    """The step that this process makes, by what its own trainer says."""
    import gc

    from forgeasync.trainer import PolicyTrainer

    (trainer,) = [one for one in gc.get_objects() if isinstance(one, PolicyTrainer)]
    return trainer.policy_version + 1


def _bring_about(fault: TrainerFault, mark: Path) -> None:
    if mark.exists():
        return

    def happen(*_: Any, **__: Any) -> None:
        if fault.moment is Moment.SNAPSHOT:
            wait_until(mark.with_name(f"{fault.step}{ANSWERED}").exists)
        mark.touch()
        match fault.way:
            case Way.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Way.EXIT:
                os._exit(3)
            case Way.SEGFAULT:
                ctypes.string_at(0)
            case Way.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Way.HANG:
                while True:
                    time.sleep(1.0)

    match fault.moment:
        case Moment.ROW:
            happen()
        case Moment.SNAPSHOT:
            import_module("forgeasync.trainer.run_checkpoint").finish = happen
        case Moment.STAGING:
            import_module("forgeasync.weights").SlotWrite.finish = happen
        case Moment.CHECKPOINT:
            written = import_module("forgeasync.trainer.run_checkpoint")
            written.publish = written.partial_folder = happen
