"""The result of every source builder: training tasks and held-out tasks that share no prompt text."""

from dataclasses import dataclass

from forgeasync.data.task import Task

HELD_OUT_SEED = 1_618_033_988
"""Chooses the held-out problems of every run, whatever its own seed: all runs are measured alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSource:
    """A ``TaskSource`` held in memory.

    ``num_skipped_held_out`` counts candidates for training that were passed over because their text is
    a held-out problem's, ``num_skipped_repeats`` those whose text is another training problem's.
    """

    train: list[Task]
    held_out: list[Task]
    num_skipped_held_out: int
    num_skipped_repeats: int = 0

    def __post_init__(self) -> None:
        assert not {task.prompt for task in self.train} & {task.prompt for task in self.held_out}
