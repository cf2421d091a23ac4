"""One reward of a scorer: the limits of its calls, and the weighted sum of several rewards."""

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
    """Holds up to ``burst`` tokens and gets ``per_s`` new ones a second; what begins takes one.

    In any t seconds at most ``burst + per_s * t`` calls begin (generic cell rate algorithm, ITU-T I.371).
    Times are in seconds of one clock, which the caller reads and which never goes back.
    """

    def __init__(self, per_s: float, *, burst: float = 1.0) -> None:
        """The bucket is full. Raises ValueError where a number is not above 0, or ``burst`` less than 1."""
        if not per_s > 0.0 or not burst >= 1.0:
            raise ValueError(f"TokenBucket: per_s = {per_s} must be above 0, and burst = {burst} at least 1")
        self._interval_s = 1.0 / per_s
        self._tolerance_s = (burst - 1.0) * self._interval_s
        self._next_s: float | None = None
        """When the bucket would be full again if nothing more began; None: it never was touched."""

    def wait_s(self, now_s: float) -> float:
        """How long the next call would have to wait; takes nothing."""
        return 0.0 if self._next_s is None else max(0.0, self._next_s - self._tolerance_s - now_s)

    def take(self, now_s: float) -> float:
        """Take the next token, which may still have to come; returns how long to wait for it."""
        wait_s = self.wait_s(now_s)
        self._next_s = max(now_s, now_s if self._next_s is None else self._next_s) + self._interval_s
        return wait_s


class CallLimits:
    """Lets calls begin within the limits of a reward's section, of which each scorer has an equal share."""

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
        """A call that would have to wait for longer than ``longest_wait_s`` is sent away instead."""
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
        """One call.

        Raises:
            RewardUnavailable: it would have to wait for longer than ``longest_wait_s`` for its turn.
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
    """One reward with what it runs in; for one event loop."""

    def start(self) -> str:
        """Start it; returns in words what it is and what isolates it."""
        ...

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        """The score of each response; ``first`` is the place of the first one in its group."""
        ...

    @property
    def version(self) -> str:
        """What tells it from others of its name, once it was started."""
        ...

    @property
    def counts(self) -> VerifierCounts:
        """Counts since it began."""
        ...

    def close(self) -> None:
        """End what it has started."""
        ...


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls; the first that raises ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def is_limited(reward: RewardSection) -> bool:
    """Whether the section of a reward limits its calls."""
    return (reward.max_concurrent, reward.max_per_s, reward.max_attempts) != (None, None, 1)


class Limited:
    """Keeps the limits of a reward's section around another ``OneReward``."""

    def __init__(
        self, reward: OneReward, section: RewardSection, *, num_replicas: int, longest_wait_s: float
    ) -> None:
        """The scorers share the limits evenly. A call whose turn would come later than in ``longest_wait_s``
        is not available."""
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
        """That of the reward."""
        return self._reward.version

    @property
    def counts(self) -> VerifierCounts:
        """Counts since it began."""
        return self._reward.counts

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        """The score of each response.

        Raises:
            RewardUnavailable: its turn would come too late.
            Exception: what the last of ``max_attempts`` calls has raised.
        """
        if self._is_whole:
            return await self._call(task, responses, first)
        calls = (self._call(task, [one], index) for index, one in enumerate(responses, first))
        return tuple(score for scores in await all_of(calls) for score in scores)

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

    The value is the sum of their values times their weights. Parts are their values by name, without the
    weights, and their own parts as ``<name>/<part>``; penalties of one name add up. The first reward decides
    whether the response is correct and has an answer. What they say comes one after the other, each behind
    the name of its reward. A single reward keeps its parts, steps and words.

    Raises:
        ValueError: one of several rewards scores steps, or the sum is too large.
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
