"""The controller's side of scoring: groups are scored concurrently, retried, and given up one by one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from forgeasync.actors.scorer import ScoredResponses
from forgeasync.actors.watched_scorer import ScorerLost
from forgeasync.config.run import ScorerSection
from forgeasync.environments.reward import Response
from forgeasync.observability.failures import last_words
from forgeasync.process_memory import MemoryPeak, largest
from forgeasync.rollouts.score import Score, VerifierCounts
from forgeasync.rollouts.task import Task

logger = logging.getLogger(__name__)

MAX_LOST = 3
"""A group during whose scoring the scorer was lost so often is given up: it may be what ends the scorer."""

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
    group (``forgeasync.actors.scorer``). Waiting here, for a place among those that are with it, has no
    limit.

    What was lost with the scorer's process is asked for again, with the same responses, and is no attempt.
    After its first loss a group is suspected of being what ends the scorer. Suspects are scored one at a
    time, so that the one that does it is found out, and is given up, without the others.
    """

    def __init__(
        self,
        score: Callable[[Task, Sequence[Response]], Awaitable[ScoredResponses]],
        section: ScorerSection,
        *,
        isolation: str = "",
        retry_wait_s: float = RETRY_WAIT_S,
    ) -> None:
        """``score`` may raise ``ScorerLost``; ``isolation`` names what isolates verifiers."""
        self.isolation = isolation
        self._score = score
        self._max_attempts = section.max_attempts
        self._places = asyncio.Semaphore(section.max_concurrent)
        self._suspects = asyncio.Lock()
        self._retry_wait_s = retry_wait_s
        self._num_failed_attempts = 0
        self._num_lost_calls = 0
        self._counts = VerifierCounts()
        self._memory: MemoryPeak | None = None

    async def score(
        self, name: str, task: Task, responses: Sequence[Response]
    ) -> tuple[Score, ...] | Unscored:
        """Return one score per response, or why there are none; ``name`` is the group's name in messages."""
        num_failed = num_lost = 0
        while True:
            try:
                async with self._suspects if num_lost else nullcontext(), self._places:
                    return await self._attempt(name, task, responses)
            except ScorerLost as error:
                num_lost += 1
                self._num_lost_calls += 1
                if num_lost == MAX_LOST:
                    reason = f"the scorer was lost {num_lost} times while it scored {name}, at last: {error}"
                    return Unscored(reason=reason)
            except Exception as error:  # any type: a scorer can fail in every way, and none may end the run
                reason = f"{type(error).__name__}: {last_words(error)}"
                num_failed += 1
                self._num_failed_attempts += 1
                logger.warning(
                    "attempt %d of %d to score %s failed: %s", num_failed, self._max_attempts, name, reason
                )
                if num_failed == self._max_attempts:
                    tries = "1 attempt" if num_failed == 1 else f"{num_failed} attempts, the last"
                    return Unscored(reason=f"{name} was not scored in {tries}: {reason}")
                await asyncio.sleep(self._retry_wait_s * 2 ** (num_failed - 1))

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began and the scorer's memory, under their names in metrics.jsonl."""
        memory = {} if self._memory is None else self._memory.metrics("scorer")
        return (
            self._counts.metrics()
            | memory
            | {
                "scoring/num_failed_attempts": self._num_failed_attempts,
                "scoring/num_lost_calls": self._num_lost_calls,
            }
        )

    async def _attempt(self, name: str, task: Task, responses: Sequence[Response]) -> tuple[Score, ...]:
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
