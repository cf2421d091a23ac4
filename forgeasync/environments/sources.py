"""Builds the problems of a run's ``data`` section: training tasks and held-out tasks that share no text."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

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
from forgeasync.environments.stored_tasks import StoredTasks
from forgeasync.rollouts import Task
from forgeasync.schema import ConfigError, Section

HELD_OUT_SEED = 1_618_033_988
"""Seed for the held-out problems of every run, independent of the run's own: all runs are measured alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDraw:
    """Training tasks of one source, and the number of candidates that were skipped."""

    tasks: Sequence[Task]
    num_skipped_held_out: int
    """Candidates with the text of a problem that is only evaluated on."""
    num_skipped_repeats: int = 0
    """Candidates with the text of another training problem."""


class SourceProblems(Protocol):
    """The problems of one source."""

    def held_out(self) -> list[Task]:
        """Draw distinct problems without the run's seed. Raises ConfigError if there are too few."""
        ...

    def train(self, never: Set[str]) -> TrainingDraw:
        """Draw training problems by the run's seed, none of them with a text in ``never``.

        Raises:
            ConfigError: there are too few.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSource:
    """All problems of a run, in memory."""

    train: Sequence[Task]
    held_out: list[Task]
    num_skipped_held_out: int
    num_skipped_repeats: int = 0
    sets: Mapping[str, list[Task]] = field(default_factory=dict)
    """Tasks of every evaluation set, by the source that they name."""

    def __post_init__(self) -> None:
        evaluated = {task.prompt for tasks in (self.held_out, *self.sets.values()) for task in tasks}
        assert not {task.prompt for task in self.train} & evaluated


MAX_GENERATED = 20_000
"""Most problems that ``look_at_data`` generates; they take about half a second."""


def build_source(data: DataSection, *, seed: int, sets: Sequence[NamedSource] = ()) -> SplitSource:
    """Build all training and held-out problems of a run with ``seed``, and those of its evaluation sets.

    Held-out problems and sets depend on the config alone; held-out problems of several sources alternate. No
    problem in them is trained on, from whichever source.

    Raises:
        ConfigError: names the config field that asks for what does not exist, and the line or record of what
            cannot be a problem.
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
    draws: list[TrainingDraw] = []
    for source, of_source in zip(sources, problems, strict=False):
        with _located(source):
            draws.append(of_source.train(never))
    return SplitSource(
        train=StoredTasks(
            task for source, draw in zip(sources, draws, strict=True) for task in _named(draw.tasks, source)
        ),
        held_out=list(_in_turns(of_sources)),
        num_skipped_held_out=sum(draw.num_skipped_held_out for draw in draws),
        num_skipped_repeats=sum(draw.num_skipped_repeats for draw in draws),
        sets={source.name: tasks for source, tasks in zip(sets, of_sets, strict=True)},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What ``look_at_data`` found."""

    words: str
    """Description of what was read or generated."""
    first_tasks: Mapping[str, Task]
    """One problem of every source that was looked at, by the source's name."""


def look_at_data(data: DataSection, *, seed: int, sets: Sequence[NamedSource] = ()) -> Look:
    """Check the problems of all sources, at less cost than ``build_source``.

    Local files are read whole, and at most ``MAX_GENERATED`` problems are generated. Data sets of the hub are
    not loaded.

    Raises:
        ConfigError: as ``build_source``.
    """
    words: list[str] = []
    first_tasks: dict[str, Task] = {}
    for source in (*named_sources(data), *sets):
        found, first = _look_at(source, seed)
        words.append(found)
        if first is not None:
            first_tasks[source.name] = first
    return Look(words="; ".join(words), first_tasks=first_tasks)


def _look_at(source: NamedSource, seed: int) -> tuple[str, Task | None]:
    if isinstance(source.source, InstalledSource) and source.source.serves_people:
        return f"{source.source.kind}; people bring the tasks", None
    looked_at = dataclasses.replace(
        source,
        num_train=min(source.num_train, MAX_GENERATED),
        num_held_out=min(source.num_held_out, MAX_GENERATED),
    )
    if isinstance(source.source, HuggingFaceSource):
        from forgeasync.environments.huggingface import is_local

        if not is_local(source.source):
            return f"{source.source.path}; of the hub: not looked at now", None
        looked_at = source
    with _located(source):
        problems = _problems(looked_at, seed)
        held_out = list(_named(problems.held_out(), source))
        if source.num_train:
            problems.train({task.prompt for task in held_out})
    if isinstance(source.source, HuggingFaceSource | InstalledSource):
        return f"{default_name(source.source)}; read now, and drawn", held_out[0]
    whole = (looked_at.num_train, looked_at.num_held_out) == (source.num_train, source.num_held_out)
    numbers = f"{looked_at.num_train:,} and {looked_at.num_held_out:,}"
    return f"{source.name}; {'all' if whole else 'the first'} {numbers} were generated now", held_out[0]


_BUILT_IN: Mapping[type[Section], str] = {
    ReasoningGymSource: "forgeasync.environments.reasoning_gym.ReasoningGymProblems",
    HuggingFaceSource: "forgeasync.environments.huggingface.HuggingFaceProblems",
    PythonSource: "forgeasync.environments.python_source.PythonProblems",
}
"""The class of each built-in kind. Some import a library that takes seconds to load."""


def _problems(source: NamedSource, seed: int) -> SourceProblems:
    numbers = {"num_train": source.num_train, "num_held_out": source.num_held_out, "seed": seed}
    section = source.source
    if isinstance(section, InstalledSource):
        return section.problems(**numbers)
    module, _, name = _BUILT_IN[type(section)].rpartition(".")
    found: SourceProblems = getattr(import_module(module), name)(section, **numbers)
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
    """Rewrite the fields in a source's errors to its place in the config; builders know only one source."""
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
    """Return a digest of problems in their order: other ones under the same names have another digest."""
    digest = hashlib.sha256()
    for task in tasks:
        for text in (task.source, task.task_id, task.prompt, task.answer):
            encoded = text.encode(errors="surrogatepass")
            # With its length: "ab" and "c" are others than "a" and "bc".
            digest.update(b"%d:" % len(encoded) + encoded)
    return f"{len(tasks)} problems, {digest.hexdigest()[:32]}"
