"""What the controller remembers of steps until snapshots hold them: a pure state machine.

    begun -> complete -> safe (forgotten)

A step is complete when its call was answered, and safe when every rank has a snapshot of its version or of a
later one. A trainer that is started again goes on from a snapshot; the complete steps after it are made again
from here, in the same order, so that a version never names two different weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

B = TypeVar("B")
"""What a step trains on."""


@dataclass(slots=True)
class StepMemory(Generic[B]):
    """The steps of a run that no snapshot holds on all ranks."""

    first_version: int
    """The version that the run begins with: it needs no snapshot to be made again."""
    completed: int = field(init=False)
    """The version of the last complete step."""
    safe_version: int = field(init=False)
    """The newest version that can be had again without training."""
    _batches: dict[int, B] = field(init=False)

    def __post_init__(self) -> None:
        self.completed = self.safe_version = self.first_version
        self._batches = {}

    def begin(self, step: int, batch: B) -> None:
        """A step is being made, for the first time."""
        assert step == self.completed + 1, "steps are made in order"
        self._batches[step] = batch

    def complete(self, step: int) -> None:
        """The step has been answered."""
        assert step == self.completed + 1 and step in self._batches, "begun, and completed once"
        self.completed = step

    def save(self, version: int) -> None:
        """Every rank has a whole snapshot of ``version``.

        Older news changes nothing, and neither does the snapshot of a step that is not answered yet: it is
        made again if its answer is lost, from the snapshot before.
        """
        if not self.safe_version < version <= self.completed:
            return
        self.safe_version = version
        for step in [step for step in self._batches if step <= version]:
            del self._batches[step]

    def after(self, version: int) -> Sequence[tuple[int, B]]:
        """The complete steps after ``version``, in order, to be made again.

        Raises:
            ValueError: they are not remembered: every rank had a newer snapshot.
        """
        if not self.safe_version <= version <= self.completed:
            raise ValueError(
                f"the trainer came back with version {version}; must be one from {self.safe_version}, of "
                f"which every rank had a snapshot, to {self.completed}, the last complete step"
            )
        return [(step, self._batches[step]) for step in range(version + 1, self.completed + 1)]


@dataclass(slots=True)
class RestartBudget:
    """Lets a trainer be started again, but not for ever."""

    max_in_a_row: int
    """So many restarts without a completed step between them (``trainer.recovery.max_restarts``)."""
    num_in_a_row: int = 0

    def take(self) -> bool:
        """Ask for one more restart; whether it may be made."""
        self.num_in_a_row += 1
        return self.num_in_a_row <= self.max_in_a_row

    def step_completed(self) -> None:
        """A step was completed since the last restart."""
        self.num_in_a_row = 0
