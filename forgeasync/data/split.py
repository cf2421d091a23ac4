"""Training tasks, and tasks that are only evaluated on: no two of them share a prompt text."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from forgeasync.data.task import Task

HELD_OUT_SEED = 1_618_033_988
"""Chooses the held-out problems of every run, whatever its own seed: all runs are measured alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDraw:
    """Training tasks of one source, and the candidates that were passed over for them."""

    tasks: list[Task]
    num_skipped_held_out: int
    """Their text is one that is only evaluated on."""
    num_skipped_repeats: int = 0
    """Their text is another training problem's."""


class SourceProblems(Protocol):
    """The problems of one source."""

    def held_out(self) -> list[Task]:
        """Distinct problems that do not depend on the run's seed. Raises ConfigError."""
        ...

    def train(self, never: Set[str]) -> TrainingDraw:
        """Training problems that follow from the run's seed, none of them with a text in ``never``.

        Raises:
            ConfigError: there are too few.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSource:
    """All problems of a run, in memory."""

    train: list[Task]
    held_out: list[Task]
    num_skipped_held_out: int
    num_skipped_repeats: int = 0
    sets: Mapping[str, list[Task]] = field(default_factory=dict)
    """Of every evaluation set, by its tasks' source."""

    def __post_init__(self) -> None:
        evaluated = {task.prompt for tasks in (self.held_out, *self.sets.values()) for task in tasks}
        assert not {task.prompt for task in self.train} & evaluated
