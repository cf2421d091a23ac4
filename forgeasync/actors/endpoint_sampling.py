"""Samples from a model behind an endpoint of others, in the place of our generators."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from forgeasync.actors.generator import CancelledGroup, EndedEpisode, RefusedGroup
from forgeasync.actors.group_sampling import HeldOutRollout, SampledGroup
from forgeasync.actors.group_scoring import GroupScoring, Unscored
from forgeasync.config import SamplingSection
from forgeasync.environments import (
    ContextFull,
    EndpointAgent,
    EndpointModel,
    EpisodeInterrupted,
    Message,
    Response,
    open_client,
    response_record,
)
from forgeasync.rollouts import EpisodeId, Score, StoredRollout, Task

T = TypeVar("T")


class NoReplica:
    """The place of a generator where an endpoint samples: it is never lost."""

    number = rank = 0
    actor = None

    async def while_there(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call."""
        return await call()


class NoTrajectories:
    """What ``GroupEpisodes`` asks of generators between turns: an endpoint keeps nothing of an episode."""

    @asynccontextmanager
    async def pinned(self, num_samples: int) -> AsyncIterator["NoReplica"]:
        """Every episode is as good as on the same generator."""
        yield NoReplica()

    async def drop_episode(self, replica: "NoReplica", episode: EpisodeId) -> None:
        """Nothing is held."""

    async def drop_episodes(self, replica: "NoReplica", group_id: int) -> None:
        """Nothing is held."""

    async def store_episodes(
        self, replica: "NoReplica", group_id: int, ended: list[EndedEpisode]
    ) -> tuple[StoredRollout, ...]:
        """Never called: nothing of an endpoint trains."""
        raise AssertionError("an endpoint's episodes are not stored")


class EndpointResponses:
    """Single responses of an endpoint's model, scored by the scorer. For one event loop."""

    def __init__(
        self, endpoint: EndpointModel, scorer: GroupScoring, *, system_prompt: str | None, limit_s: float
    ) -> None:
        """``limit_s`` is the time for a response, ``timeouts.generate_s``.

        Raises:
            ValueError: the variable with the key is not set.
        """
        self._endpoint = endpoint
        self._scorer = scorer
        self._system: list[Message] = []
        if system_prompt is not None:
            self._system.append({"role": "system", "content": system_prompt})
        self._limit_s = limit_s
        self._client = open_client(endpoint, limit_s=limit_s)

    async def sample(
        self, group_id: int, task: Task, *, seed: int | None
    ) -> SampledGroup | RefusedGroup | CancelledGroup:
        """Never called: nothing of an endpoint trains."""
        raise AssertionError("an endpoint's responses do not train")

    async def score(
        self, task: Task, *, sampling: SamplingSection, seed: int | None, keeps_record: bool = False
    ) -> HeldOutRollout:
        """Sample and score one response. The seed is not sent: few servers know it."""
        agent = EndpointAgent(
            endpoint=self._endpoint,
            sampling=sampling,
            limit_s=self._limit_s,
            max_turns=1,
            client=self._client,
        )
        name = f"held-out problem {task.task_id}"
        try:
            turn = await agent.respond([*self._system, {"role": "user", "content": task.prompt}])
        except (ContextFull, EpisodeInterrupted) as error:
            return HeldOutRollout(result=Unscored(reason=f"{name}: {error}"), num_turns=0)
        response = Response(turn.text, turn.num_tokens, turn.finish_reason)
        scores = await self._scorer.score(name, task, [response])
        result: Score | Unscored = scores if isinstance(scores, Unscored) else scores[0]
        record = None
        if keeps_record:
            score, problem = (None, result.reason) if isinstance(result, Unscored) else (result, None)
            record = response_record(task, response, score, problem, versions=None)
        return HeldOutRollout(result=result, record=record)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
