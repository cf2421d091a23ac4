"""Runs groups of episodes of one environment concurrently, each episode under a deadline.

Plain asyncio, no Monarch: the environment actor is a thin shell around this class.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from forgeasync.environments.agent import EpisodeAgent
from forgeasync.environments.conversation import MessageRenderer
from forgeasync.environments.environment import ContextFull, Environment
from forgeasync.observability.failures import last_words
from forgeasync.rollouts.score import NO_SCORE, Score
from forgeasync.rollouts.task import Task
from forgeasync.rollouts.trajectory import EpisodeId, SampledTurn

logger = logging.getLogger(__name__)

CLEAN_UP_S = 5.0
"""Time for cancelled episodes to clean up, in seconds; after that they are no longer waited for."""

SampleEpisodeTurn = Callable[[EpisodeId, np.ndarray, int], Awaitable[SampledTurn | None]]
"""``SampleTurn`` with the id of the episode."""


class EpisodeFailed(RuntimeError):
    """An episode has no score; the message names environment, task and rollout, and says why."""


class EpisodesCancelled(Exception):
    """The group was given up during an episode, because it would have been too old at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """The outcome of one episode."""

    score: Score
    num_turns: int
    is_truncated: bool
    """The episode ended because its context was full, and was not scored by the environment."""
    episode_s: float


class Episodes:
    """Runs the episodes of one environment."""

    def __init__(
        self,
        environment: Environment,
        renderer: MessageRenderer,
        *,
        name: str,
        max_context_length: int,
        limit_s: float,
    ) -> None:
        """``name`` is the environment's name in messages; ``limit_s`` is ``timeouts.episode_s``."""
        self._environment = environment
        self._renderer = renderer
        self._name = name
        self._max_context_length = max_context_length
        self._limit_s = limit_s

    async def run(
        self,
        task: Task,
        *,
        group_id: int,
        num_episodes: int,
        max_turn_tokens: int,
        sample: SampleEpisodeTurn,
    ) -> tuple[EpisodeResult, ...]:
        """Run all episodes of a group; the first one that fails ends the others.

        Raises:
            EpisodeFailed: an episode raised, took too long, took no turn, or did not return a score.
            EpisodesCancelled: the group was given up meanwhile.
            Exception: whatever ``sample`` raised, even if the environment continued without the turn.
        """
        running = [
            asyncio.create_task(
                self._run_one(task, EpisodeId(group_id=group_id, index=index), max_turn_tokens, sample)
            )
            for index in range(num_episodes)
        ]
        try:
            return tuple(await asyncio.gather(*running))
        finally:
            for one in running:
                one.cancel()
                # Others may have failed as well; only the first failure is reported.
                one.add_done_callback(_forget)
            await asyncio.wait(running)

    async def _run_one(
        self, task: Task, episode: EpisodeId, max_turn_tokens: int, sample: SampleEpisodeTurn
    ) -> EpisodeResult:
        def sample_turn(given_ids: np.ndarray, max_tokens: int) -> Awaitable[SampledTurn | None]:
            return sample(episode, given_ids, max_tokens)

        where = f"environment {self._name}, task {task.task_id}, rollout {episode.index}"
        agent = EpisodeAgent(
            sample_turn,
            self._renderer,
            max_turn_tokens=max_turn_tokens,
            max_context_length=self._max_context_length,
        )
        start_s = time.perf_counter()
        score, is_truncated = await self._score(task, agent, where)
        if not agent.num_turns:
            raise EpisodeFailed(
                f"{where}: ended without a turn of the model; must await agent.respond(...) at least once"
            )
        return EpisodeResult(
            score=score,
            num_turns=agent.num_turns,
            is_truncated=is_truncated,
            episode_s=time.perf_counter() - start_s,
        )

    async def _score(self, task: Task, agent: EpisodeAgent, where: str) -> tuple[Score, bool]:
        """Return the episode's score, and whether it was truncated instead of scored."""
        rollout = asyncio.ensure_future(self._environment.rollout(task, agent))
        try:
            # Not asyncio.timeout: the user's code could delay its own cancellation.
            await asyncio.wait([rollout], timeout=self._limit_s)
        finally:
            agent.close()
            rollout.add_done_callback(_forget)
            if not rollout.done():
                rollout.cancel()
        if agent.is_cancelled:
            raise EpisodesCancelled
        if agent.failure is not None:
            raise agent.failure
        if not rollout.done():
            await asyncio.wait([rollout], timeout=CLEAN_UP_S)
            raise EpisodeFailed(f"{where}: took longer than timeouts.episode_s = {self._limit_s:g} s")
        try:
            score = rollout.result()
        except ContextFull as error:
            if not agent.num_turns:
                raise EpisodeFailed(f"{where}: {error}") from error
            return NO_SCORE, True
        except (Exception, asyncio.CancelledError) as error:
            # Whatever the user's code raises is for the user to see, with its traceback in the log.
            logger.warning("%s", where, exc_info=error)
            raise EpisodeFailed(f"{where}: {type(error).__name__}: {last_words(error)}") from error
        if not isinstance(score, Score):
            raise EpisodeFailed(f"{where}: rollout returned {str(score)[:80]!r}; must return a Score")
        return score, False


def _forget(ended: "asyncio.Future[object]") -> None:
    """Retrieve an error that nobody will read, so that asyncio does not warn about it."""
    if not ended.cancelled():
        ended.exception()
