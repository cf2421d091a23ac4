"""A problem to solve, and where problems come from."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem.

    ``task_id`` is unique within a source and stable across runs; ``prompt`` is the text before any
    chat template; ``answer`` is the reference; ``source_index`` finds the problem again in its source, whose
    name is ``source``.
    """

    task_id: str
    prompt: str
    answer: str
    source_index: int
    source: str


class TaskSource(Protocol):
    """An indexed set of training problems and a disjoint set of held-out ones."""

    @property
    def train(self) -> list[Task]: ...

    @property
    def held_out(self) -> list[Task]: ...
