"""Builds the environment that the ``environment`` section of a config describes."""

import asyncio
import concurrent.futures
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar, cast

from forgeasync.config import (
    Bubblewrap,
    EnvironmentSection,
    InstalledEnvironment,
    McpEnvironment,
    PythonTool,
    RemoteEnvironment,
    SandboxSection,
)
from forgeasync.environments.environment import Agent, Environment
from forgeasync.rollouts import Score, Task
from forgeasync.schema import Problem, PythonCode, Section, build_code

T = TypeVar("T")

_SANDBOX = Bubblewrap()

PARAMETERS = ("task", "agent")
"""Names of the arguments of a rollout."""

RolloutFunction = Callable[[Task, Agent], Awaitable[Score]]


class _FunctionEnvironment(Environment):
    """An environment that consists of one rollout function."""

    def __init__(self, function: RolloutFunction) -> None:
        self._function = function

    async def rollout(self, task: Task, agent: Agent) -> Score:
        return await self._function(task, agent)


_BUILT_IN: Mapping[type[Section], str] = {
    PythonTool: "forgeasync.environments.tool_environments.PythonToolEnvironment",
    McpEnvironment: "forgeasync.environments.tool_environments.McpToolsEnvironment",
    RemoteEnvironment: "forgeasync.environments.remote.RemoteAgent",
}
"""The ``SectionEnvironment`` of each built-in kind, imported on use."""


class SectionEnvironment(Environment):
    """An environment that is configured by its own section."""

    @abstractmethod
    def __init__(self, section: Any, sandbox: SandboxSection) -> None:
        """``sandbox`` configures the sandbox in which the model's code runs."""

    @classmethod
    @abstractmethod
    def check(cls, section: Any, sandbox: SandboxSection) -> Iterator[Problem]:
        """Yield problems of this machine that would make every episode fail."""


def run_apart(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end on another thread, because the caller may be in an event loop."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()


def _class_of(section: EnvironmentSection) -> type[SectionEnvironment]:
    module, _, name = _BUILT_IN[type(section)].rpartition(".")
    found: type[SectionEnvironment] = getattr(import_module(module), name)
    return found


def build_environment(section: EnvironmentSection, sandbox: SandboxSection = _SANDBOX) -> Environment:
    """Build the environment of a section; imports and runs the user's code.

    ``sandbox`` configures the sandbox in which the model's code runs.

    Raises:
        ValueError: The environment does not exist, cannot be built, or has a rollout that is not
            asynchronous.
    """
    if isinstance(section, PythonCode):
        return _build_own(section)
    if isinstance(section, InstalledEnvironment):
        return section.build(sandbox)
    return _class_of(section)(section, sandbox)


def _build_own(section: PythonCode) -> Environment:
    try:
        built = build_code(section, PARAMETERS)
    except ValueError:
        raise
    except Exception as error:
        # A user's class can raise anything while it is built.
        raise ValueError(
            f"raised {type(error).__name__}: {error} when it was called with {section.options}"
        ) from error
    if isinstance(built, Environment):
        if not inspect.iscoroutinefunction(built.rollout):
            raise ValueError(
                f"{type(built).__qualname__}.rollout must be asynchronous: async def rollout(...)"
            )
        _check_parameters(built.rollout)
        return built
    if not inspect.iscoroutinefunction(built):
        raise ValueError(
            f"is neither an Environment nor an async function of ({', '.join(PARAMETERS)}); derive from "
            "forgeasync.environments.environment.Environment"
        )
    return _FunctionEnvironment(cast(RolloutFunction, built))


def _check_parameters(rollout: Callable[..., object]) -> None:
    signature = inspect.signature(rollout)
    try:
        signature.bind(*PARAMETERS)
    except TypeError as error:
        raise ValueError(f"its rollout takes {signature}; must take ({', '.join(PARAMETERS)})") from error


def check_environment(
    section: EnvironmentSection, sandbox: SandboxSection = _SANDBOX, *, is_served: bool = False
) -> Iterator[Problem]:
    """Yield problems that would make every episode of this environment fail.

    This builds a user's own environment, starts a sandbox if the environment runs the model's code, and
    starts or contacts every server once. ``is_served`` says whether people bring the tasks.
    """
    if isinstance(section, PythonCode):
        yield from _check_own(section, is_served)
    elif isinstance(section, InstalledEnvironment):
        yield from section.check_here(sandbox)
    else:
        yield from _class_of(section).check(section, sandbox)


def _check_own(section: PythonCode, is_served: bool) -> Iterator[Problem]:
    remedy = None
    try:
        built = _build_own(section)
    except ValueError as error:
        remedy = str(error)
    else:
        if is_served and not built.serves_people:
            remedy = (
                "must be derived from ServedSessions with data.source.kind = 'served', whose tasks are people"
            )
        if built.serves_people and not is_served:
            remedy = "serves people: needs data.source.kind = 'served'"
    if remedy is not None:
        yield Problem(field="environment.factory", value=section.factory, remedy=remedy)
