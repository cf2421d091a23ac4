"""Limits on the calls of a reward, and the weighted sum of several rewards."""

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from forgeasync.config import LimitedReward, PythonReward, RewardSection, ScoredUnit, name_of
from forgeasync.environments import Response
from forgeasync.rollouts import MAX_SCORER_CHARS, Score, ScoreStatus, Task, VerifierCounts, as_feedback
from forgeasync.scoring.endpoints import RewardUnavailable

T = TypeVar("T")


class TokenBucket:
    """Token bucket for one token, with ``per_s`` new ones per second; each call takes one.

    In any t seconds at most ``1 + per_s * t`` calls begin (generic cell rate algorithm, ITU-T I.371). Times
    are in seconds of one monotonic clock, which the caller reads.
    """

    def __init__(self, per_s: float) -> None:
        """Start with a full bucket."""
        self._interval_s = 1.0 / per_s
        self._next_s = -math.inf
        """Time at which the bucket is full again."""

    def wait_s(self, now_s: float) -> float:
        """Return how long the next call would have to wait, without taking a token."""
        return max(0.0, self._next_s - now_s)

    def take(self, now_s: float) -> float:
        """Take the next token, even if it is not there yet; return how long to wait for it."""
        wait_s = self.wait_s(now_s)
        self._next_s = max(now_s, self._next_s) + self._interval_s
        return wait_s


class CallLimits:
    """Enforces the call limits of a reward's section, of which each scorer has an equal share."""

    def __init__(
        self,
        section: LimitedReward,
        *,
        num_replicas: int,
        name: str,
        longest_wait_s: float,
        default_concurrent: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Calls that would have to wait longer than ``longest_wait_s`` for ``max_per_s`` are refused."""
        most = default_concurrent
        if section.max_concurrent is not None:
            most = max(1, section.max_concurrent // num_replicas)
        self._places = None if most is None else asyncio.Semaphore(most)
        self._bucket = None if section.max_per_s is None else TokenBucket(section.max_per_s / num_replicas)
        self._name = name
        self._longest_wait_s = longest_wait_s
        self._clock = clock

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Wait for permission, and run one call in the block.

        Raises:
            RewardUnavailable: The call would have to wait longer than ``longest_wait_s``.
        """
        if self._bucket is not None:
            now_s = self._clock()
            wait_s = self._bucket.wait_s(now_s)
            if wait_s > self._longest_wait_s:
                raise RewardUnavailable(f"reward {self._name!r} is at its limit of max_per_s", wait_s)
            self._bucket.take(now_s)
            await asyncio.sleep(wait_s)
        if self._places is None:
            yield
            return
        async with self._places:
            yield


class OneReward(Protocol):
    """One reward with its processes or connections; for one event loop."""

    def start(self) -> str:
        """Start the reward; return a description of it and of its isolation."""
        ...

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        """Return the score of each response; ``first`` is the index of the first one within its group."""
        ...

    @property
    def version(self) -> str:
        """Version that distinguishes rewards of equal name; available after ``start``."""
        ...

    @property
    def counts(self) -> VerifierCounts:
        """Counts since the reward was created."""
        ...

    def close(self) -> None:
        """Stop everything that ``start`` started."""
        ...


async def gather_or_cancel(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all calls; the first error cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def is_limited(reward: RewardSection) -> bool:
    """Return whether the section of a reward limits its calls."""
    return (reward.max_concurrent, reward.max_per_s, reward.max_attempts) != (None, None, 1)


class Limited:
    """Applies the limits of a reward's section to another ``OneReward``."""

    def __init__(
        self, reward: OneReward, section: RewardSection, *, num_replicas: int, longest_wait_s: float
    ) -> None:
        """Wrap ``reward``. The scorers share the limits evenly.

        A call that would have to wait longer than ``longest_wait_s`` raises ``RewardUnavailable``.
        """
        self._reward = reward
        self._max_attempts = section.max_attempts
        self._is_whole = isinstance(section, PythonReward) and section.scores is ScoredUnit.GROUP
        self._limits = CallLimits(
            section, num_replicas=num_replicas, name=name_of(section), longest_wait_s=longest_wait_s
        )
        self.start = reward.start
        self.close = reward.close

    @property
    def version(self) -> str:
        """Version of the wrapped reward."""
        return self._reward.version

    @property
    def counts(self) -> VerifierCounts:
        """Counts since the reward was created."""
        return self._reward.counts

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        """Return the score of each response.

        Raises:
            RewardUnavailable: The call would have to wait too long.
            Exception: The error of the last of ``max_attempts`` calls.
        """
        if self._is_whole:
            return await self._call(task, responses, first)
        calls = (self._call(task, [one], index) for index, one in enumerate(responses, first))
        return tuple(score for scores in await gather_or_cancel(calls) for score in scores)

    async def _call(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        for attempt in range(1, self._max_attempts + 1):
            try:
                async with self._limits.inside():
                    return await self._reward.score(task, responses, first)
            except RewardUnavailable:
                raise
            except Exception:  # any type: another call may succeed
                if attempt == self._max_attempts:
                    raise
        raise AssertionError("there is a last attempt")


def weighted_score(rewards: Sequence[RewardSection], scores: Sequence[Score]) -> Score:
    """Combine the scores of several rewards for one response.

    The value is the weighted sum of their values. Parts are their values by name, without the weights, and
    their own parts as ``<name>/<part>``; penalties of the same name are added. The first reward decides
    whether the response is correct and has an answer. Feedback is concatenated, each with the name of its
    reward. A single reward keeps its parts, steps and feedback.

    Raises:
        ValueError: One of several rewards scores steps, or the sum is too large.
    """
    if len(rewards) == 1:
        ((reward, score),) = zip(rewards, scores, strict=True)
        return score if reward.weight == 1.0 else _scaled(score, reward.weight)
    parts: dict[str, float] = {}
    penalties: dict[str, float] = {}
    for reward, score in zip(rewards, scores, strict=True):
        name = name_of(reward)
        if score.steps:
            raise ValueError(
                f"reward {name!r} scores the steps of a response, which only a reward without others can: "
                "advantages of steps would leave the others out"
            )
        parts |= {name: score.value} | {f"{name}/{part}": value for part, value in score.parts.items()}
        for fault, penalty in score.penalties.items():
            penalties[fault] = penalties.get(fault, 0.0) + penalty
    return Score(
        math.fsum(reward.weight * score.value for reward, score in zip(rewards, scores, strict=True)),
        scores[0].is_correct,
        parts=parts,
        penalties=penalties,
        has_answer=scores[0].has_answer,
        feedback=as_feedback(
            "\n".join(
                f"{name_of(reward)}: {score.feedback}"
                for reward, score in zip(rewards, scores, strict=True)
                if score.feedback
            )
        ),
        status=next((one.status for one in scores if one.status is not ScoreStatus.SCORED), scores[0].status),
        scorer="+".join(one.scorer for one in scores)[:MAX_SCORER_CHARS],
        scorer_version="+".join(one.scorer_version for one in scores)[:MAX_SCORER_CHARS],
    )


def _scaled(score: Score, weight: float) -> Score:
    steps = tuple(dataclasses.replace(step, value=step.value * weight) for step in score.steps)
    return dataclasses.replace(score, value=score.value * weight, steps=steps)
