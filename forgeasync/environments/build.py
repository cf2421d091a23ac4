"""Builds the environment that the ``environment`` section of a config describes."""

import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

from forgeasync.environments.environment import Agent, Environment
from forgeasync.rollouts.score import Score
from forgeasync.rollouts.task import Task
from forgeasync.schema.problems import Problem
from forgeasync.schema.python_code import PythonCode, build_code

PARAMETERS = ("task", "agent")
"""Names of the arguments of a rollout."""

RolloutFunction = Callable[[Task, Agent], Awaitable[Score]]


class _FunctionEnvironment(Environment):
    """An environment that consists of one rollout function."""

    def __init__(self, function: RolloutFunction) -> None:
        self._function = function

    async def rollout(self, task: Task, agent: Agent) -> Score:
        return await self._function(task, agent)


def build_environment(section: PythonCode) -> Environment:
    """Build the environment of a section; imports and runs the user's code.

    Raises:
        ValueError: it does not exist, cannot be built, or its rollout is not asynchronous.
    """
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


def check_environment(section: PythonCode) -> Iterator[Problem]:
    """Find what would end every episode of this environment before it begins: at most one problem."""
    try:
        build_environment(section)
    except ValueError as error:
        yield Problem(field="environment.factory", value=section.factory, remedy=str(error))
