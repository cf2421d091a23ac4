"""Training problems, held in little memory."""

import pickle
from array import array
from collections.abc import Iterable, Sequence
from operator import eq
from typing import overload

from forgeasync.rollouts import Task


class StoredTasks(Sequence[Task]):
    """Tasks that are made anew, equal to those that were given, whenever they are asked for.

    As objects they would take up to ten times as much: a problem of reasoning-gym with its record takes 5 KB,
    and a run has tens of thousands of them, of which it looks at one at a time.
    """

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self._ends = array("Q", [0])
        self._stored = bytearray()
        for task in tasks:
            self.append(task)

    def append(self, task: Task) -> None:
        # Written here and read here only.
        self._stored += pickle.dumps(_fields(task), pickle.HIGHEST_PROTOCOL)
        self._ends.append(len(self._stored))

    def __eq__(self, other: object) -> bool:
        # Not what is stored: equal tasks may be stored in different ways.
        return isinstance(other, StoredTasks) and len(self) == len(other) and all(map(eq, self, other))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        places = range(len(self))[index]
        return self._task(places) if isinstance(places, int) else [self._task(place) for place in places]

    def _task(self, place: int) -> Task:
        stored = self._stored[self._ends[place] : self._ends[place + 1]]
        task_id, prompt, answer, source_index, source, record = pickle.loads(stored)
        return Task(
            task_id=task_id,
            prompt=prompt,
            answer=answer,
            source_index=source_index,
            source=source,
            record=record,
        )


def _fields(task: Task) -> tuple[object, ...]:
    return task.task_id, task.prompt, task.answer, task.source_index, task.source, task.record
