"""The environment of ``kind: verifiers``: a server of Verifiers runs the episodes through our sessions."""

import asyncio
import concurrent.futures
from collections.abc import Iterator

from forgeasync.config import VerifiersServer
from forgeasync.environments.environment import Agent, Environment, EpisodeInterrupted
from forgeasync.environments.task_fields import task_fields
from forgeasync.environments.verifiers_server.connection import Connection, ServerLost
from forgeasync.environments.verifiers_server.scoring import EpisodeFailed, score_of
from forgeasync.environments.verifiers_server.wire import Refusal, run_request
from forgeasync.rollouts import Score, Task
from forgeasync.schema import Problem


class VerifiersEnvironment(Environment):
    """Every episode has a connection of its own, so that a server which was started again is simply reached
    by the next one."""

    def __init__(self, section: VerifiersServer) -> None:
        self._section = section

    async def rollout(self, task: Task, agent: Agent) -> Score:
        section = self._section
        fields = section.task_fields
        request = run_request(
            task_data=task.record
            if fields is None
            else task_fields(task, fields, where="environment.task_fields"),
            base_url=agent.base_url,
            api_key=agent.api_key,
            model=section.model,
        )
        try:
            async with Connection(section.address) as connection:
                outcome = await connection.run(request, health_s=section.health_s)
        except ServerLost as error:
            raise EpisodeInterrupted(f"the Verifiers server is lost: {error}") from error
        if isinstance(outcome, Refusal):
            raise EpisodeFailed(f"the server has refused the episode: {outcome.error}")
        return score_of(outcome, base_url=agent.base_url, correct_at=section.correct_at)


def check_server(section: VerifiersServer) -> Iterator[Problem]:
    """Ask the server for its health once; blocks for as long as that takes."""
    # In a thread of its own, since the caller may be in an event loop.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        lost = thread.submit(lambda: asyncio.run(_try(section))).result()
    if lost is not None:
        yield Problem(
            field="environment.address",
            value=section.address,
            remedy=f"cannot be used: {lost}; start the environment server of Verifiers there first",
        )


async def _try(section: VerifiersServer) -> str | None:
    try:
        async with Connection(section.address) as connection:
            await connection.check_health(limit_s=section.health_s)
    except ServerLost as error:
        return str(error)
    return None
