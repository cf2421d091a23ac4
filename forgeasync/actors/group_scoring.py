"""The controller's side of scoring: groups are scored concurrently, retried, and given up one by one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from forgeasync.actors.scorer import ScoredResponses
from forgeasync.config.run import ScorerSection
from forgeasync.environments.reward import Response
from forgeasync.observability.failures import last_words
from forgeasync.process_memory import MemoryPeak, largest
from forgeasync.rollouts.score import Score, VerifierCounts
from forgeasync.rollouts.task import Task
from forgeasync.waiting import deadline

logger = logging.getLogger(__name__)

RETRY_WAIT_S = 0.2
"""Seconds before the second attempt; the wait doubles with every further one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """A group that has no scores."""

    reason: str
    """Why the group's last attempt failed; names the group."""


class GroupScoring:
    """Scores groups, up to ``scorer.max_concurrent`` at once. A failure costs one group at most.

    The deadline of a group, ``timeouts.score_s``, is kept by the scorer, which knows when it begins with a
    group (``forgeasync.actors.scorer``). Here is only a backstop for a scorer that does not answer
    any more: since no more than ``max_concurrent`` groups are with it, none waits there for longer than that
    many deadlines. Waiting here, for a place among them, has no limit.
    """

    def __init__(
        self,
        score: Callable[[Task, Sequence[Response]], Awaitable[ScoredResponses]],
        section: ScorerSection,
        *,
        limit_s: float,
        isolation: str = "",
        retry_wait_s: float = RETRY_WAIT_S,
    ) -> None:
        """``limit_s`` is ``timeouts.score_s``; ``isolation`` names what isolates verifiers."""
        self.isolation = isolation
        self._score = score
        self._max_attempts = section.max_attempts
        self._places = asyncio.Semaphore(section.max_concurrent)
        self._backstop_s = limit_s * section.max_concurrent
        self._retry_wait_s = retry_wait_s
        self._num_failed_attempts = 0
        self._counts = VerifierCounts()
        self._memory: MemoryPeak | None = None

    async def score(
        self, name: str, task: Task, responses: Sequence[Response]
    ) -> tuple[Score, ...] | Unscored:
        """Return one score per response, or why there are none; ``name`` is the group's name in messages."""
        reason = ""
        for attempt in range(1, self._max_attempts + 1):
            if attempt > 1:
                await asyncio.sleep(self._retry_wait_s * 2 ** (attempt - 2))
            try:
                async with self._places:
                    return await self._attempt(name, task, responses)
            except Exception as error:  # any type: a scorer can fail in every way, and none may end the run
                reason = f"{type(error).__name__}: {last_words(error)}"
            self._num_failed_attempts += 1
            logger.warning(
                "attempt %d of %d to score %s failed: %s", attempt, self._max_attempts, name, reason
            )
        tries = "1 attempt" if self._max_attempts == 1 else f"{self._max_attempts} attempts, the last"
        return Unscored(reason=f"{name} was not scored in {tries}: {reason}")

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began and the scorer's memory, under their names in metrics.jsonl."""
        memory = {} if self._memory is None else self._memory.metrics("scorer")
        return self._counts.metrics() | memory | {"scoring/num_failed_attempts": self._num_failed_attempts}

    async def _attempt(self, name: str, task: Task, responses: Sequence[Response]) -> tuple[Score, ...]:
        key = "timeouts.score_s, times scorer.max_concurrent,"
        async with deadline(self._backstop_s, call=f"scoring {name}", key=key):
            scored = await self._score(task, responses)
        # Replies can arrive out of order, and counts and peaks only rise.
        self._counts = self._counts.merged(scored.counts)
        self._memory = largest((self._memory, scored.memory))
        scores = tuple(scored.scores)
        if len(scores) != len(responses):
            raise ValueError(
                f"{name} has {len(responses)} responses, and the scorer gave {len(scores)} scores for them"
            )
        for score in scores:
            if not isinstance(score, Score):
                raise TypeError(f"{name}: the scorer gave {score!r}, which is no Score")
        return scores
