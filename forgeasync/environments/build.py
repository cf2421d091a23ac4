"""Builds the environment that the ``environment`` section of a config describes."""

import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

from forgeasync.config import (
    Bubblewrap,
    CodingAgent,
    EnvironmentSection,
    McpEnvironment,
    PythonTool,
    RemoteEnvironment,
    SandboxSection,
    ServedEnvironment,
)
from forgeasync.environments.environment import Agent, Environment
from forgeasync.rollouts import Score, Task
from forgeasync.schema import Problem, PythonCode, build_code

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


def build_environment(section: EnvironmentSection, sandbox: SandboxSection = _SANDBOX) -> Environment:
    """Build the environment of a section; imports and runs the user's code.

    ``sandbox`` is where it runs what the model wrote.

    Raises:
        ValueError: it does not exist, cannot be built, or its rollout is not asynchronous.
    """
    # What an environment imports is loaded only with it.
    match section:
        case PythonTool():
            from forgeasync.environments.python_tool import PythonToolEnvironment

            return PythonToolEnvironment(section, sandbox)
        case McpEnvironment():
            from forgeasync.environments.mcp_servers.environment import McpToolsEnvironment

            return McpToolsEnvironment(section)
        case CodingAgent():
            from forgeasync.environments.coding.environment import CodingEnvironment

            return CodingEnvironment(section, sandbox)
        case ServedEnvironment():
            from forgeasync.environments.served.environment import ServedSessions

            return ServedSessions()
        case RemoteEnvironment():
            from forgeasync.environments.remote import RemoteAgent

            return RemoteAgent(section)
        case PythonCode():
            return _build_own(section)


def _build_own(section: PythonCode) -> Environment:
    try:
        built = build_code(section, PARAMETERS)
    except ValueError:
        raise
    except Exception as error:
        # Whatever the user's class raises while it is built is for the user to see.
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
    """Find what would end every episode of this environment before it begins.

    ``is_served`` says whether people bring the tasks.

    Builds a user's own environment, starts a box for one that runs code of the model, and starts or reaches
    every server once.
    """
    match section:
        case PythonTool() | CodingAgent():
            from forgeasync.isolation import check_sandbox

            yield from check_sandbox(sandbox)
        case McpEnvironment():
            from forgeasync.environments.mcp_servers.environment import check_servers

            yield from check_servers(section)
        case RemoteEnvironment():
            from forgeasync.environments.remote import check_remote

            yield from check_remote(section)
        case ServedEnvironment():
            pass
        case PythonCode():
            try:
                built = _build_own(section)
            except ValueError as error:
                yield Problem(field="environment.factory", value=section.factory, remedy=str(error))
                return
            if is_served and not built.serves_people:
                yield Problem(
                    field="environment.factory",
                    value=section.factory,
                    remedy="must be derived from ServedSessions with data.source.kind = 'served', whose "
                    "tasks are people",
                )
            if built.serves_people and not is_served:
                yield Problem(
                    field="environment.factory",
                    value=section.factory,
                    remedy="serves people: needs data.source.kind = 'served'",
                )
