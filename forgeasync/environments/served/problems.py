"""Tasks of a run that serves people: each stands for whoever comes next."""

from collections.abc import Set

from forgeasync.environments.sources import TrainingDraw
from forgeasync.rollouts import Task


class ServedProblems:
    """Tasks without content; there is nothing to hold out."""

    def __init__(self, *, num_train: int, num_held_out: int) -> None:
        assert not num_held_out, "checked by the rules on served runs"
        self._num_train = num_train

    def held_out(self) -> list[Task]:
        """Return nothing."""
        return []

    def train(self, never: Set[str]) -> TrainingDraw:
        """Return as many tasks as ``data.num_train`` says."""
        tasks = [
            Task(task_id=f"served/{index}", prompt="", answer="", source_index=index, source="served")
            for index in range(self._num_train)
        ]
        return TrainingDraw(tasks=tasks, num_skipped_held_out=0)
