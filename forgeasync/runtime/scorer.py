"""The scorer actor, and the rewards of a run: every task finds those of its source."""

import asyncio
import dataclasses
import functools
import operator
import os
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
from forgeasync.process_memory import MemoryMonitor, MemoryPeak
from forgeasync.processes import mark_this_process
from forgeasync.rollouts import MAX_SCORER_CHARS, Score, Task, VerifierCounts
from forgeasync.scoring import (
    CHOICE_CODEC,
    Judge,
    Limited,
    OneReward,
    ProcessRewardPool,
    RewardPool,
    RewardUnavailable,
    VerifiedScorer,
    all_of,
    is_limited,
    verifier_choice,
    weighted_score,
)
from forgeasync.waiting import deadline


class _Verified:
    """A verifier of ours, which sees texts only."""

    def __init__(self, scorer: VerifiedScorer, *, num_workers: int, limit_s: float) -> None:
        self._scorer = scorer
        self._scoring = ResponseScoring[str, Score](scorer.score, num_workers=num_workers, limit_s=limit_s)
        self.start = scorer.start

    async def score(self, task: Task, responses: Sequence[Response], first: int) -> tuple[Score, ...]:
        return await self._scoring.score(task, [response.text for response in responses])

    @property
    def version(self) -> str:
        return self._scorer.version

    @property
    def counts(self) -> VerifierCounts:
        return self._scorer.counts

    def close(self) -> None:
        self._scoring.close()
        self._scorer.close()


class _InProcesses:
    """A reward with processes of its own: a user's reward, or a process reward model."""

    def __init__(
        self, pool: RewardPool | ProcessRewardPool, *, limit_s: float, is_whole: bool = False
    ) -> None:
        """With ``is_whole`` one call scores all responses."""
        self._is_whole = is_whole
        self._limit_s = limit_s
        self._pool = pool
        self._scoring: ResponseScoring[Sequence[tuple[int, Response]], tuple[Score, ...]] | None = None

    def start(self) -> str:
        words = self._pool.start()
        self._scoring = ResponseScoring(
            self._score_rollouts, num_workers=self._pool.num_places, limit_s=self._limit_s
        )
        return words

    def _score_rollouts(self, task: Task, rollouts: Sequence[tuple[int, Response]]) -> tuple[Score, ...]:
        """Make one call; its errors name the rollouts."""
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
    def counts(self) -> VerifierCounts:
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
        """Start nothing. ``limit_s`` is for one group and one reward; problems were made with ``seed``."""
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
        if isinstance(reward, JudgeReward):
            member = Judge(reward, num_replicas=self._section.num_replicas)
        elif isinstance(reward, PythonReward):
            pool, is_whole = RewardPool(reward, self._section.num_workers), reward.scores is ScoredUnit.GROUP
            member = _InProcesses(pool, limit_s=self._limit_s, is_whole=is_whole)
        elif isinstance(reward, ProcessRewardModel):
            member = _InProcesses(ProcessRewardPool(reward), limit_s=self._limit_s)
        else:
            choice = verifier_choice(reward, source, seed=seed)
            limits = reward.model_dump_json(exclude={"weight", "name"}).encode()
            setup = CHOICE_CODEC.dump_json(choice) + limits
            scorer, num_workers = VerifiedScorer(choice, self._section), self._section.num_workers
            member = _Verified(scorer, num_workers=num_workers, limit_s=self._limit_s)
        return self._by_setup.setdefault(setup, self._limited(member, reward))

    def _limited(self, member: OneReward, reward: RewardSection) -> OneReward:
        # A judge counts its requests itself.
        if isinstance(reward, JudgeReward) or not is_limited(reward):
            return member
        return Limited(member, reward, num_replicas=self._section.num_replicas, longest_wait_s=self._limit_s)

    def start(self) -> str:
        """Start the processes of all rewards; returns what they are and what isolates them.

        Raises:
            ValueError: a reward is impossible, with the config field or the reason.
            VerifierFailure, RewardFailure: its process does not start.
        """
        return "; ".join(dict.fromkeys(member.start() for member in self._by_setup.values()))

    async def score(self, task: Task, responses: Sequence[Response], first: int = 0) -> tuple[Score, ...]:
        """Return the score of each response to a task; ``first`` is the first one's place in its group.

        Raises:
            RewardUnavailable: what a reward needs is not there now.
            DeadlineExceeded: it took longer than ``timeouts.score_s``.
            RewardFailure: the user's own reward has not scored; names it, the task and the rollout.
            ValueError: the rewards of a list cannot be combined; names the task and the rollout.
        """
        rewards, members = self._of_source[task.source]
        of_rewards = await all_of(member.score(task, responses, first) for member in members)
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
    def counts(self) -> VerifierCounts:
        """Sum up the answers that could not be verified so far."""
        counts = (member.counts for member in self._by_setup.values())
        return functools.reduce(operator.add, counts, VerifierCounts())

    def close(self) -> None:
        """Stop all processes."""
        for member in self._by_setup.values():
            member.close()


def _named(score: Score, reward: RewardSection, member: OneReward) -> Score:
    """Return the score with the name and version of its reward, unless it has them."""
    return dataclasses.replace(
        score,
        scorer=score.scorer or name_of(reward)[:MAX_SCORER_CHARS],
        scorer_version=score.scorer_version or member.version[:MAX_SCORER_CHARS],
    )


ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class ResponseScoring(Generic[ItemT, ResultT]):
    """A scorer's own queue: groups in the order in which they arrive, ``num_workers`` responses at once.

    A group waits here for the responses of groups before it. Its deadline starts with its first response, and
    by then all responses of those groups have begun: so queueing never counts, but for the last answers of
    the group before.
    """

    def __init__(self, score: Callable[[Task, ItemT], ResultT], *, num_workers: int, limit_s: float) -> None:
        """``score`` is called in threads; an exception of it is never the fault of the response."""
        self._score = score
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="scoring")

    async def score(self, task: Task, responses: Sequence[ItemT]) -> tuple[ResultT, ...]:
        """The score of each response.

        Raises:
            DeadlineExceeded: it took longer than ``timeouts.score_s``; what has not begun is not scored any
            more. Whatever the scorer raises.
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
        """Begin no more calls, and wait for those that have begun."""
        self._threads.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponses:
    """The scorer's reply."""

    scores: tuple[Score, ...]
    counts: VerifierCounts
    """Since the scorer began."""
    memory: MemoryPeak | None = None
    """Peak of the scorer's largest process so far; None if it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """The scorer's reply where what a reward needs is not there now; see ``RewardUnavailable``."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerReady:
    """A scorer that has been set up."""

    isolation: str
    """The rewards and what isolates verifiers, in words."""
    pid: int
    mark: str
    """Mark of everything that it starts (``forgeasync.processes``)."""


class ScorerActor(Actor):
    """One scorer in one process."""

    def __init__(self, log_dir: Path, rank: int) -> None:
        """``rank`` is its place among the run's scorers; another one may have had it before."""
        redirect_process_output(log_dir / f"scorer-{rank}.log")
        open_trace(log_dir, f"scorer-{rank}", idle=State.WAITING_FOR_BATCH)
        self._rewards: RunRewards | None = None
        # Asked with every response.
        self._memory = MemoryMonitor(with_descendants=True, every_s=1.0)

    @concurrent_endpoint
    async def setup(
        self, sources: Sequence[NamedSource], section: ScorerSection, limit_s: float, seed: int
    ) -> ScorerReady:
        """Start what scores; ``limit_s`` is for one group."""
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
        """Return the score of each response to a task; ``first`` is the first one's place in its group."""
        assert self._rewards is not None
        try:
            with doing(State.COMPUTING), span("score", {"task": task.task_id, "first": first}):
                scores = await self._rewards.score(task, responses, first)
        except RewardUnavailable as error:
            return Unavailable(reason=error.reason, retry_after_s=error.retry_after_s)
        return ScoredResponses(scores=scores, counts=self._rewards.counts, memory=self._memory.peak())
