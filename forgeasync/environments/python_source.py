"""Problems from the user's own code."""

import itertools
from collections.abc import Iterator, Mapping, Set
from typing import Any

from forgeasync.config import PythonSource
from forgeasync.environments.huggingface import read_field
from forgeasync.environments.json_records import json_like
from forgeasync.environments.sources import HELD_OUT_SEED, TrainingDraw
from forgeasync.environments.stored_tasks import StoredTasks
from forgeasync.rollouts import Task
from forgeasync.schema import ConfigError, Problem, build_code

TRAIN, HELD_OUT = "train", "held_out"

QUESTION, ANSWER = "question", "answer"


def _most_records(num_problems: int) -> int:
    """Return the most records to read for this many problems: some are repeats or held out."""
    return 4 * num_problems + 1000


class PythonProblems:
    """Problems of a function ``(split, seed)`` that returns records, finitely many or endlessly."""

    def __init__(self, source: PythonSource, *, num_train: int, num_held_out: int, seed: int) -> None:
        """Import and build the function. Raises ConfigError naming ``data.source.factory``."""
        self._source = source
        self._num_train = num_train
        self._num_held_out = num_held_out
        self._seed = seed
        try:
            self._records = build_code(source, ("split", "seed"))
        except Exception as error:
            # The user's class may raise anything when it is built.
            kind = "" if isinstance(error, ValueError) else f"raised {type(error).__name__}: "
            reason = f"{kind}{error}"
            raise self._refusal("source.factory", source.factory, reason) from error

    def held_out(self) -> list[Task]:
        """Draw distinct problems of split "held_out", by a fixed seed."""
        found: dict[str, Task] = {}
        for task in self._tasks(HELD_OUT, HELD_OUT_SEED, self._num_held_out):
            found.setdefault(task.prompt, task)
            if len(found) == self._num_held_out:
                return list(found.values())
        raise self._too_few("num_held_out", self._num_held_out, len(found))

    def train(self, never: Set[str]) -> TrainingDraw:
        """Draw problems of split "train", by the run's seed; they may repeat each other."""
        train = StoredTasks()
        num_skipped = 0
        for task in self._tasks(TRAIN, self._seed, self._num_train):
            if task.prompt in never:
                num_skipped += 1
            else:
                train.append(task)
            if len(train) == self._num_train:
                return TrainingDraw(tasks=train, num_skipped_held_out=num_skipped)
        raise self._too_few("num_train", self._num_train, len(train))

    def _tasks(self, split: str, seed: int, num_problems: int) -> Iterator[Task]:
        most = _most_records(num_problems)
        group = HELD_OUT if split == HELD_OUT else f"{TRAIN}/seed{seed}"
        for index, record in enumerate(itertools.islice(self._raw(split, seed), most)):
            where = f"record {index} of {split!r} of {self._source.factory}"
            if not isinstance(record, Mapping):
                remedy = (
                    f"gave {record!r:.80} for {where}; must give mappings such as "
                    "{'question': '1 + 1 =', 'answer': '2'}"
                )
                raise self._refusal("source.factory", self._source.factory, remedy)
            plain = dict(record)
            yield Task(
                task_id=f"{group}/{index}",
                prompt=read_field(plain, QUESTION, field="source.factory", where=where),
                answer=read_field(plain, ANSWER, field="source.factory", where=where),
                source_index=index,
                source=self._source.factory,
                record=json_like(plain),
            )

    def _raw(self, split: str, seed: int) -> Iterator[Any]:
        try:
            records = self._records(split, seed)
            # The user's function may have returned anything.
            yield from records  # type: ignore[misc]
        except Exception as error:
            # Whatever the user's code raises is for the user to see.
            remedy = f"raised {type(error).__name__}: {error}, called with ({split!r}, {seed})"
            raise self._refusal("source.factory", self._source.factory, remedy) from error

    def _too_few(self, field: str, wanted: int, found: int) -> ConfigError:
        kind = "distinct ones" if field == "num_held_out" else "ones that are not held out"
        remedy = f"{self._source.factory} gave only {found} {kind} in {_most_records(wanted)} records at most"
        return self._refusal(field, wanted, remedy)

    def _refusal(self, field: str, value: object, remedy: str) -> ConfigError:
        return ConfigError([Problem(field=f"data.{field}", value=value, remedy=remedy)])
