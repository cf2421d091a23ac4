"""The tasks of a run's ``data`` section: training tasks, held-out tasks, and the order of training.

No prompt is both a training prompt and a held-out prompt.
"""

import dataclasses
import hashlib
import itertools
import pickle
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import eq
from pkgutil import resolve_name
from typing import ClassVar, Protocol, overload

import numpy as np

from forgeasync.config import (
    DataSection,
    HuggingFaceSource,
    InstalledSource,
    NamedSource,
    PythonSource,
    ReasoningGymSource,
    default_name,
    named_sources,
)
from forgeasync.rollouts import Task
from forgeasync.schema import ConfigError, Problem, Section


class StoredTasks(Sequence[Task]):
    """Tasks stored as bytes. Reading an item creates a task that is equal to the original.

    Objects would take up to ten times as much memory: a problem of reasoning-gym with its record takes 5 KB,
    and a run has tens of thousands of them.
    """

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self._ends = array("Q", [0])
        self._stored = bytearray()
        for task in tasks:
            self.append(task)

    def append(self, task: Task) -> None:
        """Add a task at the end."""
        # Unpickling is safe, because the bytes are written only here.
        self._stored += pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
        self._ends.append(len(self._stored))

    def __eq__(self, other: object) -> bool:
        # Compare tasks, not bytes: equal tasks may be stored as different bytes.
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
        task: Task = pickle.loads(self._stored[self._ends[place] : self._ends[place + 1]])
        return task


HELD_OUT_SEED = 1_618_033_988
"""Seed for the held-out problems. It is the same in all runs, so that their scores can be compared."""


class SourceProblems(Protocol):
    """The problems of one source."""

    def held_out(self) -> list[Task]:
        """Draw distinct problems without the run's seed.

        Raises:
            ConfigError: There are too few.
        """
        ...

    def train(self, never: Set[str]) -> Sequence[Task]:
        """Draw training problems by the run's seed, none of them with a text in ``never``.

        Raises:
            ConfigError: There are too few.
        """
        ...


def refusal(field: str, value: object, remedy: str) -> ConfigError:
    """Return the error for a field of the section ``data``."""
    return ConfigError([Problem(field=f"data.{field}", value=value, remedy=remedy)])


def most_candidates(num_problems: int) -> int:
    """Return the maximum number of candidates to generate, of which some are repeats or held out."""
    return 4 * num_problems + 1000


class DrawnProblems(ABC):
    """``SourceProblems`` that takes the first usable problems of a sequence of candidates."""

    may_repeat: ClassVar[bool] = True
    """Whether two training problems may have the same text."""

    def __init__(self, name: str, *, num_train: int, num_held_out: int, seed: int) -> None:
        """``name`` is the name of the source in errors."""
        self._name = name
        self._num_train = num_train
        self._num_held_out = num_held_out
        self._seed = seed

    @abstractmethod
    def candidates(self, *, held_out: bool) -> Iterator[Task]:
        """Yield candidates, by a fixed seed if ``held_out`` is true and otherwise by the run's seed."""

    def held_out(self) -> list[Task]:
        """See ``SourceProblems``."""
        usable = self._usable(held_out=True, never=frozenset(), may_repeat=False)
        found = list(itertools.islice(usable, self._num_held_out))
        self._check_number("num_held_out", self._num_held_out, len(found), "distinct ones")
        return found

    def train(self, never: Set[str]) -> Sequence[Task]:
        """See ``SourceProblems``."""
        usable = self._usable(held_out=False, never=never, may_repeat=self.may_repeat)
        tasks = StoredTasks(itertools.islice(usable, self._num_train))
        kind = "ones that are not held out" if self.may_repeat else "distinct ones that are not held out"
        self._check_number("num_train", self._num_train, len(tasks), kind)
        return tasks

    def _usable(self, *, held_out: bool, never: Set[str], may_repeat: bool) -> Iterator[Task]:
        seen = set(never)
        for task in self.candidates(held_out=held_out):
            if task.prompt not in seen:
                if not may_repeat:
                    seen.add(task.prompt)
                yield task

    def _check_number(self, field: str, wanted: int, found: int, kind: str) -> None:
        if found < wanted:
            raise refusal(field, wanted, f"{self._name} gave only {found} {kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSource:
    """All problems of a run, in memory."""

    train: Sequence[Task]
    held_out: list[Task]
    sets: Mapping[str, list[Task]] = field(default_factory=dict)
    """Tasks of every evaluation set, by the name of its source."""

    def __post_init__(self) -> None:
        evaluated = {task.prompt for tasks in (self.held_out, *self.sets.values()) for task in tasks}
        assert not {task.prompt for task in self.train} & evaluated


MAX_GENERATED = 20_000
"""Maximum number of training problems, and of held-out ones, that ``preview_data`` generates per source."""


def build_source(data: DataSection, *, seed: int, sets: Sequence[NamedSource] = ()) -> SplitSource:
    """Build the training problems, the held-out problems and the evaluation sets of a run.

    Training problems depend on ``seed``. Held-out problems and sets depend only on the config; held-out
    problems of several sources alternate. No prompt in them is trained on, from any source.

    Raises:
        ConfigError: The config requests something that does not exist, or a record is not a valid problem.
            The error names the field, and the line or record.
    """
    sources = named_sources(data)
    problems: list[SourceProblems] = []
    held_out: list[list[Task]] = []
    for source in (*sources, *sets):
        with _located(source):
            problems.append(_problems(source, seed))
            held_out.append(list(_named(problems[-1].held_out(), source)))
    of_sources, of_sets = held_out[: len(sources)], held_out[len(sources) :]
    never = {task.prompt for tasks in held_out for task in tasks}
    train: list[Iterator[Task]] = []
    for source, of_source in zip(sources, problems, strict=False):
        with _located(source):
            train.append(_named(of_source.train(never), source))
    return SplitSource(
        train=StoredTasks(itertools.chain.from_iterable(train)),
        held_out=list(_in_turns(of_sources)),
        sets={source.name: tasks for source, tasks in zip(sets, of_sets, strict=True)},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPreview:
    """Result of ``preview_data``."""

    words: str
    """Description of what was read or generated."""
    first_tasks: Mapping[str, Task]
    """One problem of every checked source, by the source's name."""


def preview_data(data: DataSection, *, seed: int, sets: Sequence[NamedSource] = ()) -> DataPreview:
    """Check the problems of all sources, at less cost than ``build_source``.

    Local files are read completely, and ``MAX_GENERATED`` limits the generated problems. Data sets of the hub
    are not loaded.

    Raises:
        ConfigError: See ``build_source``.
    """
    words: list[str] = []
    first_tasks: dict[str, Task] = {}
    for source in (*named_sources(data), *sets):
        found, first = _preview(source, seed)
        words.append(found)
        if first is not None:
            first_tasks[source.name] = first
    return DataPreview(words="; ".join(words), first_tasks=first_tasks)


def _preview(source: NamedSource, seed: int) -> tuple[str, Task | None]:
    if isinstance(source.source, InstalledSource) and source.source.serves_people:
        return f"{source.source.kind}; people bring the tasks", None
    looked_at = dataclasses.replace(
        source,
        num_train=min(source.num_train, MAX_GENERATED),
        num_held_out=min(source.num_held_out, MAX_GENERATED),
    )
    if isinstance(source.source, HuggingFaceSource):
        from forgeasync.environments.records import is_local

        if not is_local(source.source):
            return f"{source.source.path}; of the hub: not looked at now", None
        looked_at = source
    with _located(source):
        problems = _problems(looked_at, seed)
        held_out = list(_named(problems.held_out(), source))
        first = next(iter(held_out), None)
        if source.num_train:
            problems.train({task.prompt for task in held_out})
    if isinstance(source.source, HuggingFaceSource | InstalledSource):
        return f"{default_name(source.source)}; read now, and drawn", first
    whole = (looked_at.num_train, looked_at.num_held_out) == (source.num_train, source.num_held_out)
    numbers = f"{looked_at.num_train:,} and {looked_at.num_held_out:,}"
    return f"{source.name}; {'all' if whole else 'the first'} {numbers} were generated now", first


_BUILT_IN: Mapping[type[Section], str] = {
    ReasoningGymSource: "forgeasync.environments.reasoning_gym:ReasoningGymProblems",
    HuggingFaceSource: "forgeasync.environments.records:HuggingFaceProblems",
    PythonSource: "forgeasync.environments.records:PythonProblems",
}
"""The class of each built-in kind, imported on use because some import libraries that are slow to load."""


def _problems(source: NamedSource, seed: int) -> SourceProblems:
    numbers = {"num_train": source.num_train, "num_held_out": source.num_held_out, "seed": seed}
    section = source.source
    if isinstance(section, InstalledSource):
        return section.problems(**numbers)
    found: SourceProblems = resolve_name(_BUILT_IN[type(section)])(section, **numbers)
    return found


def _named(tasks: Sequence[Task], source: NamedSource) -> Iterator[Task]:
    """Yield the tasks with the name of their source in this run."""
    for task in tasks:
        yield task if task.source == source.name else dataclasses.replace(task, source=source.name)


def _in_turns(lists: Sequence[Sequence[Task]]) -> Iterator[Task]:
    """Yield the first task of each list, then the second of each, and so on."""
    for row in itertools.zip_longest(*lists):
        yield from (task for task in row if task is not None)


@contextmanager
def _located(source: NamedSource) -> Iterator[None]:
    """Rewrite the fields in a source's errors to the source's place in the config, unknown to the source."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            dataclasses.replace(problem, field=_place(problem.field, source)) for problem in error.problems
        ) from error


def _place(field: str, source: NamedSource) -> str:
    if not source.num_train and field.startswith("data.num_"):
        return source.num_held_out_field
    if field == "data.num_held_out":
        return source.num_held_out_field
    return field.replace("data.source", source.field, 1) if field.startswith("data.source.") else field


def digest_of(tasks: Sequence[Task]) -> str:
    """Return a digest of the sources, ids, prompts and answers of problems, in their order."""
    digest = hashlib.sha256()
    for task in tasks:
        for text in (task.source, task.task_id, task.prompt, task.answer):
            encoded = text.encode(errors="surrogatepass")
            # The length distinguishes "ab", "c" from "a", "bc".
            digest.update(b"%d:" % len(encoded) + encoded)
    return f"{len(tasks)} problems, {digest.hexdigest()[:32]}"


_BLOCK = 4096
"""Number of sources that are drawn at a time."""


class TaskOrder:
    """Endless passes over ``tasks``, each in another random order.

    The next task depends only on ``seed`` and ``position``, so one integer restores the order.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, position: int = 0) -> None:
        assert len(tasks), "an order of no tasks has no next one"
        assert position >= 0, f"position {position} is negative"
        self._tasks = tasks
        self._seed = seed
        self._position = position
        self._epoch: int | None = None
        self._permutation = np.empty(0, dtype=np.int64)

    @property
    def position(self) -> int:
        """Number of tasks issued so far, over all passes."""
        return self._position

    @property
    def epoch(self) -> int:
        """Number of complete passes so far."""
        return self._position // len(self._tasks)

    def next(self) -> Task:
        """Issue the next task."""
        if self._epoch != self.epoch:
            self._epoch = self.epoch
            self._permutation = np.random.default_rng([self._seed, self.epoch]).permutation(len(self._tasks))
        task = self._tasks[self._permutation[self._position % len(self._tasks)]]
        self._position += 1
        return task


class WeightedOrder:
    """Draws a source at random for every task, in proportion to the sources' weights.

    Each source has its own passes. The next task depends only on ``seed`` and ``position``.
    """

    def __init__(
        self, sources: Sequence[Sequence[Task]], weights: Sequence[float], *, seed: int, position: int = 0
    ) -> None:
        assert len(sources) == len(weights) and min(weights) > 0.0 and position >= 0
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._seed = seed
        self._position = position
        self._block = -1
        self._drawn = np.empty(0, dtype=np.int64)
        num_drawn = np.zeros(len(sources), dtype=np.int64)
        for block in range(position // _BLOCK):
            num_drawn += np.bincount(self._draw(block), minlength=len(sources))
        rest = self._draw(position // _BLOCK)[: position % _BLOCK]
        num_drawn += np.bincount(rest, minlength=len(sources))
        self._orders = [
            # Each source has its own seed; otherwise sources of equal size would be issued in the same order.
            TaskOrder(tasks, seed=_seed_of_source(seed, index), position=int(num))
            for index, (tasks, num) in enumerate(zip(sources, num_drawn, strict=True))
        ]

    @property
    def position(self) -> int:
        """Number of tasks issued so far."""
        return self._position

    def next(self) -> Task:
        """Issue the next task."""
        block, index = divmod(self._position, _BLOCK)
        if block != self._block:
            self._block, self._drawn = block, self._draw(block)
        self._position += 1
        return self._orders[self._drawn[index]].next()

    def _draw(self, block: int) -> np.ndarray:
        """Draw the sources of the tasks in a block."""
        rng = np.random.default_rng([self._seed, _SOURCES_KEY, block])
        return rng.choice(len(self._shares), size=_BLOCK, p=self._shares)


_SOURCES_KEY = 2_718_281_828
"""Separates draws of sources from other draws with the run's seed."""


def _seed_of_source(seed: int, index: int) -> int:
    return int(np.random.SeedSequence((seed, _SOURCES_KEY, index)).generate_state(1)[0])


def weighted_order(
    tasks: Sequence[Task], weights: Mapping[str, float], *, seed: int, position: int = 0
) -> TaskOrder | WeightedOrder:
    """Return the order of a run's training problems; ``weights`` has the weight of each source by name."""
    if len(weights) == 1:
        return TaskOrder(tasks, seed=seed, position=position)
    places: dict[str, list[int]] = {name: [] for name in weights}
    for place, task in enumerate(tasks):
        places[task.source].append(place)
    by_source = [StoredTasks(tasks[place] for place in of_source) for of_source in places.values()]
    return WeightedOrder(by_source, list(weights.values()), seed=seed, position=position)


def sampling_seed(run_seed: int, draw_id: int) -> int:
    """Return the sampling seed of a group: 64 bits, so that no two groups of a run share one."""
    return int(np.random.SeedSequence((run_seed, draw_id)).generate_state(1, np.uint64)[0])
