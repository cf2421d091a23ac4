"""Samples the rollouts of groups: responses of the generators, responses of an endpoint, or episodes.

``GroupEpisodes`` runs the episodes of a group, applies the policy for each ending, and stores the result. If
the generator of a group is lost, another one takes over the turns that had begun, and the episodes continue.
"""

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from forgeasync.buffer import DropReason
from forgeasync.config import Ending, EndingPolicy, EpisodesSection, SamplingSection
from forgeasync.environments import (
    AgentRole,
    ContextFull,
    EndpointAgent,
    EndpointModel,
    EpisodeCancelled,
    EpisodeInterrupted,
    Message,
    Response,
    open_client,
    response_record,
)
from forgeasync.rollouts import (
    NO_SCORE,
    EpisodeId,
    EpisodeOutcome,
    PromptEncoder,
    Score,
    StoredRollout,
    Task,
    VersionRange,
    record_of,
)
from forgeasync.runtime.environment import EpisodeRequest, GroupMove
from forgeasync.runtime.environment_pool import EnvironmentPool
from forgeasync.runtime.generator import CANCELLED, EndedEpisode, RefusedGroup
from forgeasync.runtime.generator_pool import LiveReplica
from forgeasync.runtime.router import GeneratorRouter, GroupGivenUp
from forgeasync.runtime.scorer_pool import GroupScoring, Unscored
from forgeasync.runtime.supervised import ProcessLost
from forgeasync.waiting import forget


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup:
    """The rollouts of a group; episodes include their scores."""

    rollouts: tuple[StoredRollout, ...]
    scores: tuple[Score, ...] | None = None
    """Score of each rollout; None if the scorer still has to score them."""
    durations_ms: tuple[int, ...] | None = None
    """Duration of each rollout's episode; None if rollouts are responses."""
    outcomes: tuple[EpisodeOutcome, ...] = ()
    """All attempts at the group's episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutRollout:
    """A response or an episode that is not trained on."""

    result: Score | Unscored
    versions: VersionRange | None = None
    """Policy versions that sampled it; None if it has no turn or an endpoint sampled it."""
    ending: Ending | None = None
    """Ending of the episode's last attempt; None for a response to one prompt."""
    num_turns: int = 1
    record: Mapping[str, Any] | None = None
    """The whole episode as JSON values, if requested."""


class GroupSampler(Protocol):
    """Samples the rollouts of a task, for training and for evaluation."""

    async def sample(self, group_id: int, task: Task, *, seed: int | None) -> SampledGroup | RefusedGroup:
        """Sample the group of a task; its arrays stay with the generator until freed."""
        ...

    async def score(
        self, task: Task, *, sampling: SamplingSection, seed: int | None, keeps_record: bool = False
    ) -> HeldOutRollout:
        """Sample and score one rollout that is not trained on."""
        ...


class ResponseGroups:
    """Samples single responses to the task's prompt, which the scorer scores afterwards."""

    def __init__(
        self,
        generators: GeneratorRouter,
        scorer: GroupScoring,
        prompts: PromptEncoder,
        *,
        group_size: int,
        sampling: SamplingSection,
    ) -> None:
        """``sampling`` is the config's section for training."""
        self._generators = generators
        self._scorer = scorer
        self._prompts = prompts
        self._group_size = group_size
        self._sampling = sampling

    async def sample(self, group_id: int, task: Task, *, seed: int | None) -> SampledGroup | RefusedGroup:
        """Sample the group of a task, without scores; scoring of responses that end early begins."""
        is_sampled = False
        try:
            answer = await self._generators.sample_group(
                group_id,
                self._prompts.encode(task.prompt),
                num_samples=self._group_size,
                sampling=self._sampling,
                seed=seed,
                on_finished=functools.partial(self._scorer.finished, group_id, task),
            )
            if isinstance(answer, RefusedGroup):
                return answer
            is_sampled = True
            return SampledGroup(rollouts=answer)
        finally:
            if not is_sampled:
                self._scorer.forget(group_id)

    async def score(
        self, task: Task, *, sampling: SamplingSection, seed: int | None, keeps_record: bool = False
    ) -> HeldOutRollout:
        """Sample and score one response that is not trained on."""
        try:
            (turn,) = await self._generators.respond(
                self._prompts.encode(task.prompt), num_samples=1, sampling=sampling, seed=seed
            )
        except GroupGivenUp as given_up:
            return HeldOutRollout(result=Unscored(reason=f"held-out problem {task.task_id}: {given_up}"))
        response = Response(turn.text, turn.num_tokens, turn.finish_reason)
        return await _score_held_out(self._scorer, task, response, turn.versions, keeps_record)


async def _score_held_out(
    scorer: GroupScoring,
    task: Task,
    response: Response,
    versions: VersionRange | None,
    keeps_record: bool,
) -> HeldOutRollout:
    """Score a response that is not trained on."""
    scores = await scorer.score(f"held-out problem {task.task_id}", task, [response])
    result: Score | Unscored = scores if isinstance(scores, Unscored) else scores[0]
    record = None
    if keeps_record:
        score, problem = (None, result.reason) if isinstance(result, Unscored) else (result, None)
        record = response_record(task, response, score, problem, versions=versions)
    return HeldOutRollout(result=result, versions=versions, record=record)


T = TypeVar("T")


class NoReplica:
    """Substitute for a generator if an endpoint samples; it is never lost."""

    number = rank = 0
    actor = None

    async def call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call."""
        return await call()


class NoTrajectories:
    """Substitute for the router in ``GroupEpisodes`` if an endpoint samples; it stores no turns."""

    @asynccontextmanager
    async def pinned(self, num_samples: int) -> AsyncIterator["NoReplica"]:
        """Let any number of episodes run."""
        yield NoReplica()

    async def drop_episode(self, replica: "NoReplica", episode: EpisodeId) -> None:
        """Do nothing."""

    async def drop_episodes(self, replica: "NoReplica", group_id: int) -> None:
        """Do nothing."""


class EndpointResponses:
    """Samples single responses from an endpoint's model, which the scorer scores. For one event loop."""

    def __init__(
        self, endpoint: EndpointModel, scorer: GroupScoring, *, system_prompt: str | None, limit_s: float
    ) -> None:
        """``limit_s`` is the time limit of a response, ``timeouts.generate_s``.

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

    async def sample(self, group_id: int, task: Task, *, seed: int | None) -> SampledGroup | RefusedGroup:
        """Never called: an endpoint's responses are not trained on."""
        raise AssertionError("an endpoint's responses do not train")

    async def score(
        self, task: Task, *, sampling: SamplingSection, seed: int | None, keeps_record: bool = False
    ) -> HeldOutRollout:
        """Sample and score one response. The seed is not sent, because few servers support it."""
        agent = EndpointAgent(
            endpoint=self._endpoint,
            sampling=sampling,
            limit_s=self._limit_s,
            max_turns=1,
            client=self._client,
        )
        try:
            turn = await agent.respond([*self._system, {"role": "user", "content": task.prompt}])
        except (ContextFull, EpisodeInterrupted) as error:
            return HeldOutRollout(
                result=Unscored(reason=f"held-out problem {task.task_id}: {error}"), num_turns=0
            )
        response = Response(turn.text, turn.num_tokens, turn.finish_reason)
        return await _score_held_out(self._scorer, task, response, None, keeps_record)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """An episode after its last attempt."""

    outcomes: tuple[EpisodeOutcome, ...]
    """Outcome of each attempt."""
    trains: bool
    episode: EpisodeId

    @property
    def last(self) -> EpisodeOutcome:
        return self.outcomes[-1]

    def is_whole(self, taken_over: Mapping[EpisodeId, frozenset[int]], roles: Sequence[AgentRole]) -> bool:
        """Return whether a generator has taken over all turns that are trained on."""
        return not self.trains or all(
            len(taken_over.get(dataclasses.replace(self.episode, agent=agent), ())) >= outcome.num_turns
            for agent, outcome in enumerate(self.last.agents)
            if roles[agent].is_trainable
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class EpisodeGroup:
    """A group whose episodes are running, and the generator that holds their turns."""

    group_id: int
    replica: LiveReplica
    task: Task
    sampling: SamplingSection
    seed: int | None
    keeps_record: bool
    can_fail_over: bool
    """Whether its episodes continue on another generator if this one is lost."""
    data: bytes | None = None
    """Turns that the lost generator had logged."""
    num_moves: int = 0
    running: "list[asyncio.Future[EndedRun]]" = dataclasses.field(default_factory=list)
    """One future for each episode."""

    async def all_ended(self) -> list[EndedRun]:
        """Wait for all episodes, which continue if the caller is cancelled."""
        return await asyncio.gather(*map(asyncio.shield, self.running))


MIN_ROLLOUTS = 2
"""Minimum number of rollouts of a group that trains, since advantages compare them. A smaller ``group_size``
lowers it."""


def without_texts(rollout: StoredRollout) -> StoredRollout:
    """Return a rollout without its texts."""
    branches = tuple(dataclasses.replace(branch, text="") for branch in rollout.branches)
    return dataclasses.replace(rollout, branches=branches)


class GroupEpisodes:
    """Runs groups of episodes. A group is pinned to one generator, which holds its trajectories.

    Episodes are assigned to workers separately, so the loss of a worker costs the episodes that it ran but no
    group. ``episodes.endings`` has the policy for each ending.
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
        """``sampling`` is the config's section for training. Without ``keeps_texts``, only the tokens that
        are trained on leave the worker and the generator of an episode."""
        self._keeps_texts = keeps_texts
        self._max_lost_per_group = max_lost_per_group
        self._min_rollouts = min(MIN_ROLLOUTS, group_size)
        self._pool = pool
        self._generators = generators
        self._roles = tuple(roles)
        self._group_size = group_size
        self._sampling = sampling
        self._section = section
        # Groups outside the buffer have negative ids.
        self._evaluation_ids = itertools.count(-1, -1)

    async def sample(self, group_id: int, task: Task, *, seed: int | None) -> SampledGroup | RefusedGroup:
        """Sample and score the group of a task; its arrays stay with the generator until freed.

        If its generator is lost, another one takes over its turns, and its episodes continue.
        """
        group: EpisodeGroup | None = None
        with self._generators.cancellable(group_id) as is_cancelled:
            try:
                for num_lost in range(self._max_lost_per_group):
                    try:
                        async with self._generators.pinned(self._group_size, group_id) as replica:
                            if group is None:
                                group = EpisodeGroup(
                                    group_id=group_id,
                                    replica=replica,
                                    task=task,
                                    sampling=self._sampling,
                                    seed=seed,
                                    keeps_record=self._keeps_texts,
                                    can_fail_over=True,
                                )
                                group.running = [self._start(group, one) for one in range(self._group_size)]
                            else:
                                await self._take_over(group, replica, is_cancelled)
                            ended = await replica.call(group.all_ended)
                            return await self._store(replica, group_id, ended)
                    except ProcessLost as lost:
                        problem = f"group {group_id}: {lost}, the last of {num_lost + 1} lost generators"
                        if group is not None and group.replica is replica:
                            group.data = (await asyncio.shield(replica.recovered)).groups.get(group_id)
                return RefusedGroup(problem=problem, reason=DropReason.LOST)
            except EpisodeCancelled:
                await self._generators.drop_episodes(replica, group_id)
                return CANCELLED
            finally:
                if group is not None:
                    await self._end(group)

    async def _take_over(
        self, group: EpisodeGroup, replica: LiveReplica, is_cancelled: Callable[[], bool]
    ) -> None:
        """Let a generator take over the episodes of a lost one, which continue there.

        Raises:
            ProcessLost: this generator is lost as well.
            EpisodeCancelled: the group was cancelled.
        """
        taken_over: Mapping[EpisodeId, frozenset[int]] = {}
        if group.data is not None:
            restored = await self._generators.restore_episodes(replica, group.group_id, group.data)
            if restored is None:
                raise EpisodeCancelled
            taken_over = restored
        lost, group.replica = group.replica, replica
        group.num_moves += 1
        # This also ends the episodes of a cancelled group.
        self._pool.move_group(
            GroupMove(
                group_id=group.group_id,
                lost=lost.number,
                generator=replica.actor,
                number=replica.number,
                ended=taken_over,
            )
        )
        if is_cancelled():
            raise EpisodeCancelled
        for index, one in enumerate(group.running):
            if one.done() and one.exception() is None and not one.result().is_whole(taken_over, self._roles):
                # Some of its turns are lost, so it runs again from the start.
                group.running[index] = self._start(group, index, one.result().episode.attempt + 1)

    async def _end(self, group: EpisodeGroup) -> None:
        """End the episodes of a group, including those that wait for a generator."""
        for one in group.running:
            one.cancel()
        await asyncio.wait(group.running)
        if group.replica.lost.is_set():
            self._pool.move_group(
                GroupMove(
                    group_id=group.group_id, lost=group.replica.number, generator=None, number=-1, ended={}
                )
            )
        self._pool.forget_moves(group.group_id)

    def _start(self, group: EpisodeGroup, index: int, first_attempt: int = 0) -> "asyncio.Future[EndedRun]":
        running = asyncio.ensure_future(self._run(group, index, first_attempt))
        running.add_done_callback(forget)
        return running

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began, and current values, by their names in metrics.jsonl."""
        return self._pool.metrics()

    async def score(
        self, task: Task, *, sampling: SamplingSection, seed: int | None, keeps_record: bool = False
    ) -> HeldOutRollout:
        """Run one episode that is not trained on, and return the score of its first trainable agent."""
        group_id = next(self._evaluation_ids)
        ended, problem = None, ""
        for num_lost in range(self._max_lost_per_group):
            async with self._generators.pinned(1) as replica:
                group = EpisodeGroup(
                    group_id=group_id,
                    replica=replica,
                    task=task,
                    sampling=sampling,
                    seed=seed,
                    keeps_record=keeps_record,
                    can_fail_over=False,
                )
                first_attempt = num_lost * self._section.max_attempts
                try:
                    ended = await replica.call(functools.partial(self._run, group, 0, first_attempt))
                    break
                except ProcessLost as lost:
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

    async def _run(self, group: EpisodeGroup, index: int, first_attempt: int) -> EndedRun:
        """Run an episode until an attempt counts, or no attempts are left.

        Attempts that the loss of a generator interrupted do not count.
        """
        outcomes: list[EpisodeOutcome] = []
        num_left, trains = self._section.max_attempts, False
        for attempt in itertools.count(first_attempt):
            episode = EpisodeId(group_id=group.group_id, index=index, attempt=attempt)
            num_moves = group.num_moves
            request = EpisodeRequest(
                task=group.task,
                episode=episode,
                generator=group.replica.actor,
                generator_number=group.replica.number,
                sampling=group.sampling,
                seed=group.seed,
                keeps_record=group.keeps_record,
                can_fail_over=group.can_fail_over,
            )
            outcome = await self._pool.run_episode(request)
            if outcome is None:
                raise EpisodeCancelled
            outcomes.append(outcome)
            policy = self._section.endings.of(outcome.ending)
            if policy in (EndingPolicy.SCORE, EndingPolicy.ZERO):
                trains = outcome.num_turns > 0
                break
            for agent in range(len(self._roles)):
                await self._generators.drop_episode(group.replica, dataclasses.replace(episode, agent=agent))
            was_moved = outcome.ending is Ending.INFRASTRUCTURE and group.num_moves != num_moves
            num_left -= not was_moved
            if policy is EndingPolicy.MASK or not num_left:
                break
        return EndedRun(outcomes=tuple(outcomes), trains=trains, episode=episode)

    async def _store(
        self, replica: LiveReplica, group_id: int, ended: Sequence[EndedRun]
    ) -> SampledGroup | RefusedGroup:
        """Store the rollouts of a group that are trained on, or refuse a group with too few of them."""
        trained = [
            (one, agent)
            for one in ended
            if one.trains
            for agent, role in enumerate(self._roles)
            if role.is_trainable and one.last.agents[agent].num_turns
        ]
        outcomes = tuple(outcome for one in ended for outcome in one.outcomes)
        if len([one for one in ended if one.trains]) < self._min_rollouts or not trained:
            await self._generators.drop_episodes(replica, group_id)
            lost = [one for one in ended if not one.trains]
            if lost and all(one.last.ending is Ending.NO_SCORE for one in lost):
                # This is no failure: nobody has scored the group.
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
                for one, agent in trained
            ],
        )
        if isinstance(stored, RefusedGroup):
            return dataclasses.replace(stored, outcomes=outcomes)
        return SampledGroup(
            rollouts=stored if self._keeps_texts else tuple(map(without_texts, stored)),
            scores=tuple(self._score(one.last, agent) for one, agent in trained),
            durations_ms=tuple(round(one.last.episode_s * 1000) for one, _ in trained),
            outcomes=outcomes,
        )

    def _score(self, outcome: EpisodeOutcome, agent: int) -> Score:
        score = outcome.agents[agent].score
        if score is None or self._section.endings.of(outcome.ending) is EndingPolicy.ZERO:
            return NO_SCORE
        return score
