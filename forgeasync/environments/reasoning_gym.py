"""Problems from reasoning-gym, which generates each problem from a seed and an index.

reasoning-gym generates problem ``i`` of a data set from ``seed + i``, so nearby seeds share nearly all
problems. This module hashes the seeds.
"""

import dataclasses
import difflib
import hashlib
from collections.abc import Iterator
from typing import Any

from forgeasync.config import ReasoningGymSource
from forgeasync.environments.records import json_like
from forgeasync.environments.sources import (
    HELD_OUT_SEED,
    DrawnProblems,
    most_candidates,
    refusal,
)
from forgeasync.environments.workarounds.gym_imports import DATASETS, ProceduralDataset, create_dataset
from forgeasync.rollouts import Task

OWN_OPTIONS = frozenset({"seed", "size"})
"""Options of reasoning-gym that this module sets itself."""


_NUM_REPRODUCED = 4
"""Number of problems that are generated twice to find data sets that ignore their seed."""


def _spread_seed(seed: int) -> int:
    # 31 bits, because some data sets pass seed + index to NumPy, which accepts 32 bits.
    return int.from_bytes(hashlib.sha256(f"train {seed}".encode()).digest()[:4]) & 0x7FFF_FFFF


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return "nearest known names: " + ", ".join(near or known)


def _create(source: ReasoningGymSource, *, seed: int, size: int) -> ProceduralDataset:
    """Return a data set of reasoning-gym. Raises ConfigError that names the wrong field."""
    if source.task not in DATASETS:
        remedy = f"reasoning-gym has no such data set; {_nearest(source.task, sorted(DATASETS))}"
        raise refusal("source.task", source.task, remedy)
    _, config_class = DATASETS[source.task]
    known = [field.name for field in dataclasses.fields(config_class) if field.name not in OWN_OPTIONS]
    for name, value in source.options.items():
        if name in OWN_OPTIONS:
            remedy = f"{name!r} ({value!r}) is set by the run itself; leave it out"
            raise refusal("source.options", source.options, remedy)
        if name not in known:
            remedy = f"{source.task!r} has no option {name!r} (set to {value!r}); {_nearest(name, known)}"
            raise refusal("source.options", source.options, remedy)
    try:
        return create_dataset(source.task, seed=seed, size=size, **source.options)
    except (AssertionError, TypeError, ValueError) as error:
        # Some assertions of reasoning-gym have no message.
        reason = str(error) or type(error).__name__
        remedy = f"{source.task!r} refuses this (with {size} problems): {reason}"
        raise refusal("source.options", source.options, remedy) from error


class ReasoningGymProblems(DrawnProblems):
    """Training and held-out problems of a data set of reasoning-gym, generated on demand.

    A training problem's ``source_index`` is its index; that of held-out problem ``i`` is ``-1 - i``. Raises
    ConfigError that names ``data.source.task`` or ``data.source.options``.
    """

    def __init__(self, source: ReasoningGymSource, *, num_train: int, num_held_out: int, seed: int) -> None:
        name = f"{source.task!r} with {source.options!r}"
        super().__init__(name, num_train=num_train, num_held_out=num_held_out, seed=seed)
        self.source = source
        self._train = _create(source, seed=_spread_seed(seed), size=most_candidates(num_train))
        self._held_out = _create(source, seed=HELD_OUT_SEED, size=most_candidates(num_held_out))

    def entry(self, source_index: int) -> dict[str, Any]:
        """Return reasoning-gym's record of a problem.

        Raises:
            ConfigError: The problem cannot be generated.
        """
        dataset, index = (
            (self._train, source_index) if source_index >= 0 else (self._held_out, -1 - source_index)
        )
        try:
            return dataset[index]
        except Exception as error:  # any type: 100 generators, each with its own way of failing
            remedy = f"{self.source.task!r} cannot generate problem {index}: {type(error).__name__}: {error}"
            raise refusal("source.options", self.source.options, remedy) from error

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """Return the verifier's score of ``answer``, usually 0 to 1; raises what the verifier raises."""
        return float(self._train.score_answer(answer, entry))

    def held_out(self) -> list[Task]:
        """See ``SourceProblems``."""
        held_out = super().held_out()
        self._check_reproducible(held_out[:_NUM_REPRODUCED])
        return held_out

    def candidates(self, *, held_out: bool) -> Iterator[Task]:
        """See ``DrawnProblems``."""
        # The id has the seed, because problems at the same index differ between seeds.
        group = "held_out" if held_out else f"seed{self._seed}"
        for index in range(len(self._held_out if held_out else self._train)):
            source_index = -1 - index if held_out else index
            entry = self.entry(source_index)
            answer = entry["answer"]
            yield Task(
                task_id=f"{self.source.task}/{group}/{index}",
                prompt=entry["question"],
                # Puzzles with many solutions have no reference; their verifier reads the entry.
                answer="" if answer is None else str(answer),
                source_index=source_index,
                source=self.source.task,
                record=json_like(entry),
            )

    def _check_reproducible(self, tasks: list[Task]) -> None:
        for task in tasks:
            if self.entry(task.source_index)["question"] != task.prompt:
                raise refusal(
                    "source.task",
                    self.source.task,
                    "generates different problems from the same seed, so they cannot be scored; choose a "
                    "data set that is deterministic",
                )
