"""Coding tasks from a file of records."""

import os
import stat
from collections.abc import Set
from pathlib import Path
from random import Random

from forgeasync.config import CodingSource
from forgeasync.environments.coding.hidden_tests import hidden_tests
from forgeasync.environments.coding.record import CHECKOUT, PACKAGES, read_record
from forgeasync.environments.json_records import json_like, read_json_records
from forgeasync.environments.sources import HELD_OUT_SEED, TrainingDraw
from forgeasync.rollouts import Task
from forgeasync.schema import ConfigError, Problem


class CodingProblems:
    """The tasks of a file; held-out ones are drawn by a fixed seed, the others are for training."""

    def __init__(self, source: CodingSource, *, num_train: int, num_held_out: int, seed: int) -> None:
        """Read and check all records: checkouts are there, and test patches apply to them.

        Raises:
            ConfigError: names the line of a record that is wrong.
        """
        self._source = source
        self._num_train = num_train
        self._num_held_out = num_held_out
        self._seed = seed
        tasks = _read(source)
        # One issue may have several records; those that share a text must be held out together.
        texts = sorted({task.prompt for task in tasks})
        Random(HELD_OUT_SEED).shuffle(texts)
        held_out = set(texts[:num_held_out])
        first = {task.prompt: task for task in reversed(tasks)}
        self._held_out = [first[text] for text in texts[:num_held_out]]
        self._others = [task for task in tasks if task.prompt not in held_out]

    def held_out(self) -> list[Task]:
        """Return distinct tasks. Raises ConfigError if there are too few."""
        if len(self._held_out) < self._num_held_out:
            raise self._too_few("num_held_out", self._num_held_out, len(self._held_out))
        return self._held_out

    def train(self, never: Set[str]) -> TrainingDraw:
        """Return tasks for training, ordered by the run's seed. Raises ConfigError if there are too few."""
        tasks = [task for task in self._others if task.prompt not in never]
        if len(tasks) < self._num_train:
            raise self._too_few("num_train", self._num_train, len(tasks))
        Random(self._seed).shuffle(tasks)
        return TrainingDraw(
            tasks=tasks[: self._num_train], num_skipped_held_out=len(self._others) - len(tasks)
        )

    def _too_few(self, field: str, wanted: int, found: int) -> ConfigError:
        remedy = f"{self._source.path} has only {found} for this; data.num_held_out are kept apart"
        return ConfigError([Problem(field=f"data.{field}", value=wanted, remedy=remedy)])


def _read(source: CodingSource) -> list[Task]:
    path = Path(source.path)
    if not path.is_file():
        raise _refusal(source, "there is no such file")
    folder = (path.parent if source.checkouts is None else Path(source.checkouts)).absolute()
    tasks: list[Task] = []
    places: dict[str, str] = {}
    try:
        for where, raw in read_json_records(path):
            try:
                record = read_record(raw, folder)
                _check_checkout(record.checkout, path)
                hidden_tests(record)
            except ValueError as error:
                raise _refusal(source, f"{where}: {error}") from None
            if (earlier := places.setdefault(record.instance_id, where)) != where:
                raise _refusal(source, f"{where}: {earlier} has instance_id {record.instance_id!r} too")
            plain = json_like(raw) | {CHECKOUT: str(record.checkout)}
            if record.packages is not None:
                plain[PACKAGES] = str(record.packages)
            tasks.append(
                Task(
                    task_id=record.instance_id,
                    prompt=record.problem_statement,
                    answer="",
                    source_index=len(tasks),
                    source=source.path,
                    record=plain,
                )
            )
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise _refusal(source, f"cannot be read: {error}") from None
    return tasks


def _check_checkout(checkout: Path, records: Path) -> None:
    """Raises ValueError if a box cannot begin with a copy of the folder, or would show the hidden tests."""
    if records.resolve().is_relative_to(checkout.resolve()):
        raise ValueError(
            f"checkout = {str(checkout)!r}: has the file of records in it, with the hidden tests; must be "
            "the repository's own folder"
        )
    for parent, _, files in os.walk(checkout):
        for name in files:
            kind = os.lstat(where := os.path.join(parent, name)).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind)):
                raise ValueError(
                    f"checkout = {str(checkout)!r}: {os.path.relpath(where, checkout)!r} is a pipe, a socket "
                    "or a device; must have files, folders and links only"
                )


def _refusal(source: CodingSource, remedy: str) -> ConfigError:
    return ConfigError([Problem(field="data.source.path", value=source.path, remedy=remedy)])
