"""The environment of ``kind: openenv``: a server of OpenEnv is reset with the task and stepped with turns."""

import asyncio
import concurrent.futures
import contextlib
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forgeasync.config import EpisodeReward, OpenEnvServer, Opening, StepTool, TextAction
from forgeasync.environments.environment import Agent, Environment, EpisodeInterrupted
from forgeasync.environments.messages import Message
from forgeasync.environments.openenv.actions import ActionForm, Attempt, list_actions, observation_text
from forgeasync.environments.openenv.connection import Connection, ServerLost
from forgeasync.environments.openenv.wire import BadReward, ErrorCode, Observation, ServerError
from forgeasync.environments.task_fields import task_fields
from forgeasync.rollouts import Score, Task, ToolStatus
from forgeasync.schema import Problem

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
"""Between two attempts to get a session of a server all of whose sessions are in use."""


class EpisodeFailed(RuntimeError):
    """The server says that its environment has failed; says how."""


@dataclass(slots=True, kw_only=True)
class _Course:
    """What an episode has come to so far."""

    rewards: list[float] = field(default_factory=list)
    num_failed: int = 0
    """Attempts of the model that the environment has not taken, or whose tool has failed."""
    num_unused: int = 0
    """Attempts after the one that ended the episode."""
    is_done: bool = False

    def take(self, observation: Observation) -> None:
        if observation.reward is not None:
            self.rewards.append(observation.reward)
        self.is_done = observation.done


class OpenEnvEnvironment(Environment):
    """Every episode has a connection, and with it an environment of the server, of its own.

    ``failed_calls`` among the penalties counts actions that the environment has not taken, ``unused_calls``
    those that the model had planned for after the end.
    """

    def __init__(self, section: OpenEnvServer) -> None:
        self._section = section

    async def rollout(self, task: Task, agent: Agent) -> Score:
        arguments = task_fields(task, self._section.reset_fields, where="environment.reset_fields")
        try:
            async with self._begun(arguments) as (session, first):
                return await self._play(task, agent, session, first)
        except ServerLost as error:
            raise EpisodeInterrupted(f"the OpenEnv server is lost: {error}") from error
        except ServerError as error:
            raise EpisodeFailed(f"the server's environment has failed: {error.code}: {error}") from error

    @contextlib.asynccontextmanager
    async def _begun(self, arguments: Mapping[str, Any]) -> AsyncIterator[tuple[Connection, Observation]]:
        """Get a session of the server and reset it; waits while all of them are in use."""
        section = self._section
        wait_s = _FIRST_WAIT_S
        give_up_s = asyncio.get_running_loop().time() + section.open_s
        while True:
            async with Connection(section.url, open_s=section.open_s) as session:
                try:
                    first = await session.reset(arguments)
                except ServerError as error:
                    if error.code != ErrorCode.CAPACITY_REACHED:
                        raise
                    full = error
                else:
                    yield session, first
                    return
            if asyncio.get_running_loop().time() + wait_s > give_up_s:
                raise ServerLost(
                    f"{section.url} had no free session for {section.open_s:g} s ({full}); raise "
                    "max_concurrent_envs of the server or environment.open_s, or lower "
                    "episodes.max_live_per_worker"
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _play(self, task: Task, agent: Agent, session: Connection, first: Observation) -> Score:
        section = self._section
        form = await list_actions(section.action, section.observation_field, session)
        messages = self._opening(task, first)
        course = _Course(is_done=first.done)
        for _ in range(section.max_rounds):
            if course.is_done:
                break
            turn = await agent.respond(messages, tools=form.tools)
            messages.append(turn.message)
            attempts = form.attempts(turn)
            if not attempts:
                break
            for attempt in attempts:
                if course.is_done:
                    course.num_unused += 1
                    continue
                status, text = await self._try(attempt, form, session, course)
                course.num_failed += not status.is_success
                if not isinstance(section.action, TextAction):
                    agent.count_tool_call(status)
                messages.append(attempt.answer(text))
        return self._score(course)

    async def _try(
        self, attempt: Attempt, form: ActionForm, session: Connection, course: _Course
    ) -> tuple[ToolStatus, str]:
        """Take the action of an attempt; returns what came of it, and what the model is told."""
        if attempt.action is None:
            return attempt.status, attempt.problem
        try:
            observation = await session.step(attempt.action)
        except ServerError as error:
            if error.code != ErrorCode.VALIDATION_ERROR:
                raise
            return ToolStatus.BAD_ARGUMENTS, f"Error: this is no action of the environment: {error}"
        course.take(observation)
        status, text = form.told(observation)
        return self._cut(status, text)

    def _cut(self, status: ToolStatus, text: str) -> tuple[ToolStatus, str]:
        most = self._section.max_result_characters
        if len(text) <= most:
            return status, text
        return (
            ToolStatus.CUT if status is ToolStatus.OK else status,
            f"{text[:most]}\n[{len(text) - most} more characters were cut]",
        )

    def _opening(self, task: Task, first: Observation) -> list[Message]:
        section = self._section
        parts = [] if section.opening is Opening.OBSERVATION else [task.prompt]
        if section.opening is not Opening.PROMPT:
            parts.append(self._cut(ToolStatus.OK, observation_text(first, section.observation_field))[1])
        messages: list[Message] = []
        if section.system_prompt is not None:
            messages.append({"role": "system", "content": section.system_prompt})
        messages.append({"role": "user", "content": "\n\n".join(parts)})
        return messages

    def _score(self, course: _Course) -> Score:
        """The score of an episode that has ended, or that the model has stopped.

        Raises:
            ValueError: it has ended without any reward.
        """
        if course.is_done and not course.rewards:
            # NaN comes as null too: that is how OpenEnv writes it.
            raise ValueError("the episode has ended, but no step had a reward that is a number")
        rewards = course.rewards or [0.0]
        value = rewards[-1] if self._section.reward is EpisodeReward.LAST else math.fsum(rewards)
        return Score(
            value,
            value >= self._section.correct_at,
            penalties={
                "failed_calls": float(course.num_failed),
                "unused_calls": float(course.num_unused),
            },
        )


def check_server(section: OpenEnvServer) -> Iterator[Problem]:
    """Open a session once, and look for the fields that the config names; blocks while that takes."""
    # In a thread of its own, since the caller may be in an event loop.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        yield from thread.submit(lambda: asyncio.run(_problems(section))).result()


async def _problems(section: OpenEnvServer) -> list[Problem]:
    problems: list[Problem] = []
    try:
        async with Connection(section.url, open_s=section.open_s) as session:
            if isinstance(section.action, TextAction):
                fields = (await session.schema("action")).get("properties")
                problems += _missing("environment.action.field", section.action.field, fields)
            else:
                await list_actions(section.action, None, session)
            if section.observation_field is not None and isinstance(section.action, StepTool | TextAction):
                fields = (await session.schema("observation")).get("properties")
                problems += _missing("environment.observation_field", section.observation_field, fields)
    except (ServerLost, ServerError, BadReward) as error:
        return [
            Problem(
                field="environment.url",
                value=section.url,
                remedy=f"cannot be used: {error}; start the OpenEnv server there first",
            )
        ]
    return problems


def _missing(where: str, name: str, fields: object) -> Iterator[Problem]:
    if isinstance(fields, dict) and name not in fields:
        known = ", ".join(sorted(fields))
        yield Problem(field=where, value=name, remedy=f"must be a field that the server has: {known}"[:500])
