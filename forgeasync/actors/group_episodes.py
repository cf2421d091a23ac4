"""Has groups of episodes run: what becomes of each ending, and what is stored of a group."""

import asyncio
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from forgeasync.actors.environment import EpisodeRequest
from forgeasync.actors.environment_pool import EnvironmentPool
from forgeasync.actors.generator import CancelledGroup, EndedEpisode, RefusedGroup
from forgeasync.actors.group_sampling import HeldOutRollout, SampledGroup
from forgeasync.actors.group_scoring import Unscored
from forgeasync.actors.replica import LiveReplica, ReplicaLost
from forgeasync.actors.router import GeneratorRouter
from forgeasync.buffer.decisions import DropReason
from forgeasync.config.episodes import Ending, EndingPolicy, EpisodesSection
from forgeasync.config.generator import SamplingSection
from forgeasync.environments.episodes import AgentRole
from forgeasync.rollouts.outcome import EpisodeOutcome, record_of
from forgeasync.rollouts.rollout import StoredRollout
from forgeasync.rollouts.score import NO_SCORE, Score
from forgeasync.rollouts.task import Task
from forgeasync.rollouts.trajectory import EpisodeId

MIN_ROLLOUTS = 2
"""A group that has fewer left has nothing to compare them with, unless groups have one rollout anyway."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """An episode after its last attempt."""

    outcomes: tuple[EpisodeOutcome, ...]
    """One for each attempt."""
    trains: bool
    episode: EpisodeId

    @property
    def last(self) -> EpisodeOutcome:
        return self.outcomes[-1]


ADMISSION_S = 0.5
"""Seconds between two looks at a KV cache that is short."""


class _GroupCancelled(Exception):
    """The group was given up during one of its episodes."""


def without_texts(rollout: StoredRollout) -> StoredRollout:
    """Return a rollout that says nothing of what was said."""
    branches = tuple(dataclasses.replace(branch, text="") for branch in rollout.branches)
    return dataclasses.replace(rollout, branches=branches)


class GroupEpisodes:
    """Runs groups of episodes. A group is pinned to one generator, which holds its trajectories.

    Each episode goes to a worker by itself, so that the loss of a worker costs the episodes that it ran and
    no group. What an ending means is ``episodes.endings``.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        generators: GeneratorRouter,
        *,
        roles: Sequence[AgentRole],
        group_size: int,
        sampling: SamplingSection,
        section: EpisodesSection,
        max_lost_per_group: int,
        keeps_texts: bool = True,
    ) -> None:
        """``sampling`` is the config's section for training. Without ``keeps_texts`` nothing that was said in
        an episode leaves its worker and its generator but tokens that are trained on."""
        self._keeps_texts = keeps_texts
        self._max_lost_per_group = max_lost_per_group
        self._min_rollouts = min(MIN_ROLLOUTS, group_size)
        self._pool = pool
        self._generators = generators
        self._roles = tuple(roles)
        self._group_size = group_size
        self._sampling = sampling
        self._section = section
        self._num_groups: Counter[int] = Counter()
        self.num_admission_waits = 0
        """Groups that had to wait for room in a generator's KV cache."""
        # Groups that no buffer knows of have negative ids.
        self._evaluation_ids = itertools.count(-1, -1)

    async def sample(
        self, group_id: int, task: Task, *, seed: int | None
    ) -> SampledGroup | RefusedGroup | CancelledGroup:
        """Sample and score the group of a task; its arrays stay with the generator until freed.

        If its generator is lost, its episodes run again from the start, with another one.
        """
        for num_lost in range(self._max_lost_per_group):
            try:
                async with self._generators.pinned(self._group_size) as replica, self._admitted(replica):
                    first_attempt = num_lost * self._section.max_attempts
                    return await self._sample(replica, group_id, task, seed, first_attempt)
            except ReplicaLost as lost:
                problem = f"group {group_id}: {lost}, as {num_lost} before it"
        return RefusedGroup(problem=problem, reason=DropReason.LOST)

    @asynccontextmanager
    async def _admitted(self, replica: LiveReplica) -> AsyncIterator[None]:
        """Wait while the generator's KV cache is short, unless it has no group at all.

        A group that starts then would only push others out of the cache, to be computed again.
        """
        has_waited = False
        number = replica.number
        while self._num_groups[number] and await self._is_short_of_kv(replica):
            self.num_admission_waits += not has_waited
            has_waited = True
            await asyncio.sleep(ADMISSION_S)
        self._num_groups[number] += 1
        try:
            yield
        finally:
            self._num_groups[number] -= 1

    async def _is_short_of_kv(self, replica: LiveReplica) -> bool:
        return await self._generators.kv_usage(replica) > self._section.max_kv_usage

    async def _sample(
        self, replica: LiveReplica, group_id: int, task: Task, seed: int | None, first_attempt: int
    ) -> SampledGroup | RefusedGroup | CancelledGroup:
        running = [
            asyncio.ensure_future(
                self._run(
                    task,
                    EpisodeId(group_id=group_id, index=index),
                    replica,
                    self._sampling,
                    seed,
                    keeps_record=self._keeps_texts,
                    first_attempt=first_attempt,
                )
            )
            for index in range(self._group_size)
        ]
        try:
            ended = await asyncio.gather(*running)
        except _GroupCancelled:
            await self._generators.drop_episodes(replica, group_id)
            return CancelledGroup()
        finally:
            for one in running:
                one.cancel()
            await asyncio.wait(running)
        return await self._store(replica, group_id, ended)

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began, and current values, under their names in metrics.jsonl."""
        return self._pool.metrics() | {"environment/num_admission_waits": self.num_admission_waits}

    async def score(
        self, task: Task, *, sampling: SamplingSection, seed: int | None, keeps_record: bool = False
    ) -> HeldOutRollout:
        """Score one episode that is not trained on, by its first agent that is trained."""
        group_id = next(self._evaluation_ids)
        ended, problem = None, ""
        for num_lost in range(self._max_lost_per_group):
            async with self._generators.pinned(1) as replica:
                try:
                    ended = await self._run(
                        task,
                        EpisodeId(group_id=group_id, index=0),
                        replica,
                        sampling,
                        seed,
                        keeps_record=keeps_record,
                        first_attempt=num_lost * self._section.max_attempts,
                    )
                    break
                except ReplicaLost as lost:
                    problem = str(lost)
                finally:
                    await self._generators.drop_episodes(replica, group_id)
        if ended is None:
            reason = f"the episode of held-out problem {task.task_id} lost its generators: {problem}"
            return HeldOutRollout(result=Unscored(reason=reason))
        result: Score | Unscored
        if ended.trains:
            agent = next(index for index, role in enumerate(self._roles) if role.is_trainable)
            result = self._score(ended.last, agent)
        else:
            problem = ended.last.problem or f"ended as {ended.last.ending}"
            result = Unscored(reason=f"the episode of held-out problem {task.task_id} failed: {problem}")
        return HeldOutRollout(
            result=result,
            versions=ended.last.versions,
            ending=ended.last.ending,
            num_turns=ended.last.num_turns,
            record=record_of(ended.outcomes),
        )

    async def _run(
        self,
        task: Task,
        episode: EpisodeId,
        replica: LiveReplica,
        sampling: SamplingSection,
        seed: int | None,
        *,
        keeps_record: bool,
        first_attempt: int,
    ) -> _Ended:
        """Run an episode until an attempt counts, or there are no attempts left.

        Raises:
            ReplicaLost: its generator is gone.
        """
        outcomes: list[EpisodeOutcome] = []
        for attempt in range(first_attempt, first_attempt + self._section.max_attempts):
            episode = dataclasses.replace(episode, attempt=attempt)
            request = EpisodeRequest(
                task=task,
                episode=episode,
                generator=replica.actor,
                generator_number=replica.number,
                sampling=sampling,
                seed=seed,
                keeps_record=keeps_record,
            )
            outcome = await replica.while_there(functools.partial(self._pool.run_episode, request))
            if isinstance(outcome, CancelledGroup):
                raise _GroupCancelled
            outcomes.append(outcome)
            policy = self._section.endings.of(outcome.ending)
            if policy in (EndingPolicy.SCORE, EndingPolicy.ZERO):
                return _Ended(outcomes=tuple(outcomes), trains=outcome.num_turns > 0, episode=episode)
            for agent in range(len(self._roles)):
                await self._generators.drop_episode(replica, dataclasses.replace(episode, agent=agent))
            if policy is EndingPolicy.MASK:
                break
        return _Ended(outcomes=tuple(outcomes), trains=False, episode=episode)

    async def _store(
        self, replica: LiveReplica, group_id: int, ended: Sequence[_Ended]
    ) -> SampledGroup | RefusedGroup:
        """Store what trains of a group; without enough of it the group is given up."""
        taken = [
            (one, agent)
            for one in ended
            if one.trains
            for agent, role in enumerate(self._roles)
            if role.is_trainable and one.last.agents[agent].num_turns
        ]
        outcomes = tuple(outcome for one in ended for outcome in one.outcomes)
        if len([one for one in ended if one.trains]) < self._min_rollouts or not taken:
            await self._generators.drop_episodes(replica, group_id)
            lost = [one for one in ended if not one.trains]
            if lost and all(one.last.ending is Ending.NO_SCORE for one in lost):
                # Nothing went wrong: nobody had to say how good it was.
                return RefusedGroup(problem=None, reason=DropReason.NO_SCORE, outcomes=outcomes)
            problems = [one.last.problem for one in ended if one.last.problem is not None]
            why = problems[0] if problems else "too few episodes of it can train"
            return RefusedGroup(
                problem=f"group {group_id}: {why}", reason=DropReason.EPISODE_FAILED, outcomes=outcomes
            )
        stored = await self._generators.store_episodes(
            replica,
            group_id,
            [
                EndedEpisode(
                    episode=dataclasses.replace(one.episode, agent=agent),
                    is_truncated=one.last.ending is Ending.LENGTH,
                )
                for one, agent in taken
            ],
        )
        if isinstance(stored, RefusedGroup):
            return dataclasses.replace(stored, outcomes=outcomes)
        return SampledGroup(
            rollouts=stored if self._keeps_texts else tuple(map(without_texts, stored)),
            scores=tuple(self._score(one.last, agent) for one, agent in taken),
            durations_ms=tuple(round(one.last.episode_s * 1000) for one, _ in taken),
            outcomes=outcomes,
        )

    def _score(self, outcome: EpisodeOutcome, agent: int) -> Score:
        score = outcome.agents[agent].score
        if score is None or self._section.endings.of(outcome.ending) is EndingPolicy.ZERO:
            return NO_SCORE
        return score
