"""The scorer actor, and the rewards of a run by data source."""

import asyncio
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from monarch.actor import Actor, concurrent_endpoint

from forgeasync.config import (
    JudgeReward,
    NamedSource,
    ProcessRewardModel,
    PythonReward,
    RewardSection,
    ScoredUnit,
    ScorerSection,
    name_of,
)
from forgeasync.environments import Response
from forgeasync.observability import State, doing, open_trace, redirect_process_output, span, started
from forgeasync.processes import MemoryMonitor, MemoryPeak, mark_this_process
from forgeasync.rollouts import MAX_SCORER_CHARS, Score, Task
from forgeasync.scoring import (
    CHOICE_CODEC,
    Judge,
    OneReward,
    ProcessRewardPool,
    RewardPool,
    RewardUnavailable,
    VerifierPool,
    gather_or_cancel,
    verifier_choice,
    weighted_score,
)
from forgeasync.waiting import deadline


class _Pooled:
    """A reward with its own processes: a verifier, a user's reward, or a process reward model."""

    def __init__(
        self,
        pool: VerifierPool | RewardPool | ProcessRewardPool,
        *,
        most_calls: int,
        limit_s: float,
        is_whole: bool = False,
    ) -> None:
        """At most ``most_calls`` run at once. With ``is_whole``, one call scores all responses."""
        self._most_calls = most_calls
        self._is_whole = is_whole
        self._limit_s = limit_s
        self._pool = pool
        self._scoring: ResponseScoring[Sequence[tuple[int, Response]], tuple[Score, ...]] | None = None

    def start(self) -> str:
        words = self._pool.start()
        num_workers = min(self._pool.num_places, self._most_calls)
        self._scoring = ResponseScoring(self._score_rollouts, num_workers=num_workers, limit_s=self._limit_s)
        return words

    def _score_rollouts(self, task: Task, rollouts: Sequence[tuple[int, Response]]) -> tuple[Score, ...]:
        """Make one call; its errors name the rollouts. Verifiers see texts only."""
        if isinstance(self._pool, VerifierPool):
            return tuple(self._pool.score(task, response.text) for _, response in rollouts)
        first, last = rollouts[0][0], rollouts[-1][0]
        name = f"rollout {first}" if first == last else f"rollouts {first} to {last}"
        return self._pool.score(task, [response for _, response in rollouts], name)

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        assert self._scoring is not None, "started"
        numbered = list(enumerate(responses, first))
        calls = await self._scoring.score(task, [numbered] if self._is_whole else [[one] for one in numbered])
        return tuple(score for scores in calls for score in scores)

    @property
    def version(self) -> str:
        return self._pool.version

    @property
    def counts(self) -> Counter[str]:
        return self._pool.counts

    def close(self) -> None:
        self._pool.close()
        if self._scoring is not None:
            self._scoring.close()


class RunRewards:
    """All rewards of a run; a task is scored by those of its source."""

    def __init__(
        self, sources: Sequence[NamedSource], section: ScorerSection, *, limit_s: float, seed: int
    ) -> None:
        """``limit_s`` is the limit of one reward for one group; ``seed`` generated the problems."""
        self._section = section
        self._limit_s = limit_s
        # Sources with the same verifier share its processes.
        self._by_setup: dict[bytes, OneReward] = {}
        self._of_source: dict[str, tuple[tuple[RewardSection, ...], tuple[OneReward, ...]]] = {}
        for source in sources:
            members = tuple(self._member(reward, source, seed) for reward in source.rewards)
            self._of_source[source.name] = (source.rewards, members)

    def _member(self, reward: RewardSection, source: NamedSource, seed: int) -> OneReward:
        member: OneReward
        setup = reward.model_dump_json(exclude={"weight"}).encode()
        # The scorers share the limit evenly.
        most_calls = (reward.max_concurrent or sys.maxsize) // self._section.num_replicas
        if isinstance(reward, JudgeReward):
            member = Judge(reward, num_replicas=self._section.num_replicas)
        elif isinstance(reward, PythonReward):
            pool, is_whole = RewardPool(reward, self._section.num_workers), reward.scores is ScoredUnit.GROUP
            member = _Pooled(pool, most_calls=most_calls, limit_s=self._limit_s, is_whole=is_whole)
        elif isinstance(reward, ProcessRewardModel):
            member = _Pooled(ProcessRewardPool(reward), most_calls=most_calls, limit_s=self._limit_s)
        else:
            choice = verifier_choice(reward, source, seed=seed)
            limits = reward.model_dump_json(exclude={"weight", "name"}).encode()
            setup = CHOICE_CODEC.dump_json(choice) + limits
            pooled = VerifierPool(choice, self._section)
            member = _Pooled(pooled, most_calls=most_calls, limit_s=self._limit_s)
        return self._by_setup.setdefault(setup, member)

    def start(self) -> str:
        """Start the processes of all rewards; return a description of them and of their isolation.

        Raises:
            ValueError: a reward is impossible; names the config field or the reason.
            VerifierFailure, RewardFailure: a process does not start.
        """
        return "; ".join(dict.fromkeys(member.start() for member in self._by_setup.values()))

    async def score(self, task: Task, responses: Sequence[Response], first: int = 0) -> tuple[Score, ...]:
        """Return the score of each response to a task; ``first`` is the index of the first one in its group.

        Raises:
            RewardUnavailable: a service that a reward needs is unavailable.
            DeadlineExceeded: it took longer than ``timeouts.score_s``.
            RewardFailure: the user's own reward has failed; names it, the task and the rollout.
            ValueError: the rewards of a list cannot be combined; names the task and the rollout.
        """
        rewards, members = self._of_source[task.source]
        of_rewards = await gather_or_cancel(member.score(task, responses, first) for member in members)
        scores = []
        for index, of_response in enumerate(zip(*of_rewards, strict=True), first):
            try:
                named = [
                    _named(score, reward, member)
                    for score, reward, member in zip(of_response, rewards, members, strict=True)
                ]
                scores.append(weighted_score(rewards, named))
            except ValueError as error:
                raise ValueError(f"task {task.task_id}, rollout {index}: {error}") from None
        return tuple(scores)

    @property
    def counts(self) -> Counter[str]:
        """Total counts of all rewards so far."""
        return sum((member.counts for member in self._by_setup.values()), Counter())

    def close(self) -> None:
        """Stop all processes."""
        for member in self._by_setup.values():
            member.close()


def _named(score: Score, reward: RewardSection, member: OneReward) -> Score:
    """Return the score with the name and version of its reward, unless it already has them."""
    return dataclasses.replace(
        score,
        scorer=score.scorer or name_of(reward)[:MAX_SCORER_CHARS],
        scorer_version=score.scorer_version or member.version[:MAX_SCORER_CHARS],
    )


ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class ResponseScoring(Generic[ItemT, ResultT]):
    """Queue of one reward: scores groups in their order of arrival, ``num_workers`` responses at once.

    A group's deadline starts with its first response. By then, all responses of earlier groups have been
    started. Thus waiting in the queue does not count against the deadline, except for the last answers of the
    group before.
    """

    def __init__(self, score: Callable[[Task, ItemT], ResultT], *, num_workers: int, limit_s: float) -> None:
        """``score`` is called in threads; its exceptions are never the fault of the response."""
        self._score = score
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="scoring")

    async def score(self, task: Task, responses: Sequence[ItemT]) -> tuple[ResultT, ...]:
        """Return the score of each response.

        Raises:
            DeadlineExceeded: it took longer than ``timeouts.score_s``; calls that have not begun are dropped.
            Exception: whatever the scorer raises.
        """
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        def score_one(response: ItemT) -> ResultT:
            loop.call_soon_threadsafe(begun.set)
            return self._score(task, response)

        scores = [loop.run_in_executor(self._threads, score_one, response) for response in responses]
        try:
            if scores:
                await begun.wait()
            call = f"scoring {len(responses)} responses to task {task.task_id}"
            async with deadline(self._limit_s, call=call, key="timeouts.score_s"):
                return tuple(await asyncio.gather(*scores))
        finally:
            for one in scores:
                one.cancel()

    def close(self) -> None:
        """Start no more calls, and wait for those in progress."""
        self._threads.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponses:
    """The scorer's reply."""

    scores: tuple[Score, ...]
    counts: Counter[str]
    """Counts since the scorer began."""
    memory: MemoryPeak | None = None
    """Peak of the scorer's largest process so far; None if it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """The scorer's reply if a service that a reward needs is unavailable; see ``RewardUnavailable``."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerReady:
    """A scorer that has been set up."""

    isolation: str
    """Description of the rewards and of the isolation of verifiers."""
    pid: int
    mark: str
    """Mark of all processes that it starts (``forgeasync.processes``)."""


class ScorerActor(Actor):
    """One scorer in one process."""

    def __init__(self, log_dir: Path, rank: int) -> None:
        """``rank`` is its place among the run's scorers; it may replace an earlier one."""
        redirect_process_output(log_dir / f"scorer-{rank}.log")
        open_trace(log_dir, f"scorer-{rank}", idle=State.WAITING_FOR_BATCH)
        self._rewards: RunRewards | None = None
        # Read with every response.
        self._memory = MemoryMonitor(with_descendants=True, every_s=1.0)

    @concurrent_endpoint
    async def setup(
        self, sources: Sequence[NamedSource], section: ScorerSection, limit_s: float, seed: int
    ) -> ScorerReady:
        """Start the rewards; ``limit_s`` is the time limit of one group."""
        mark = mark_this_process()
        self._rewards = RunRewards(sources, section, limit_s=limit_s, seed=seed)
        isolation = self._rewards.start()
        started()
        return ScorerReady(isolation=isolation, pid=os.getpid(), mark=mark)

    @concurrent_endpoint
    async def beat(self) -> None:
        """Answer, to show that the event loop runs."""

    @concurrent_endpoint
    async def score(
        self, task: Task, responses: Sequence[Response], first: int
    ) -> ScoredResponses | Unavailable:
        """Return the score of each response to a task; ``first`` is the first one's index in its group."""
        assert self._rewards is not None
        try:
            with doing(State.COMPUTING), span("score", {"task": task.task_id, "first": first}):
                scores = await self._rewards.score(task, responses, first)
        except RewardUnavailable as error:
            return Unavailable(reason=error.reason, retry_after_s=error.retry_after_s)
        return ScoredResponses(scores=scores, counts=self._rewards.counts, memory=self._memory.peak())
