"""Has groups sampled: single responses to a prompt, or the episodes of an environment."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from forgeasync.actors.environment import EnvironmentActor, SampledGroup
from forgeasync.actors.generator import CancelledGroup, RefusedGroup
from forgeasync.actors.group_scoring import GroupScoring, Unscored
from forgeasync.actors.router import GeneratorRouter
from forgeasync.buffer.decisions import DropReason
from forgeasync.config.generator import SamplingSection
from forgeasync.config.run import TimeoutSection
from forgeasync.rollouts.prompts import PromptEncoder
from forgeasync.rollouts.score import Score
from forgeasync.rollouts.task import Task
from forgeasync.waiting import DeadlineExceeded, deadline


class GroupSampler(Protocol):
    """Samples the rollouts of a task, for training and for evaluation."""

    async def sample(
        self, group_id: int, task: Task, *, seed: int | None
    ) -> SampledGroup | RefusedGroup | CancelledGroup:
        """Sample the group of a task; its arrays stay with the generator until freed."""
        ...

    async def score(self, task: Task, *, sampling: SamplingSection, seed: int | None) -> Score | Unscored:
        """Sample and score one rollout that is not trained on."""
        ...


class ResponseGroups:
    """Samples single responses to the task's prompt. The scorer scores them afterwards."""

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

    async def sample(
        self, group_id: int, task: Task, *, seed: int | None
    ) -> SampledGroup | RefusedGroup | CancelledGroup:
        """Sample the group of a task; it still has to be scored."""
        answer = await self._generators.sample_group(
            group_id,
            self._prompts.encode(task.prompt),
            num_samples=self._group_size,
            sampling=self._sampling,
            seed=seed,
        )
        if isinstance(answer, RefusedGroup | CancelledGroup):
            return answer
        return SampledGroup(rollouts=answer)

    async def score(self, task: Task, *, sampling: SamplingSection, seed: int | None) -> Score | Unscored:
        """Sample and score one response that is not trained on."""
        responses = await self._generators.respond(
            self._prompts.encode(task.prompt), num_samples=1, sampling=sampling, seed=seed
        )
        scores = await self._scorer.score(f"held-out problem {task.task_id}", task, responses)
        return scores if isinstance(scores, Unscored) else scores[0]


class GroupEpisodes:
    """Runs groups of episodes. A failing environment costs one group at most.

    The deadline of an episode, ``timeouts.episode_s``, is kept where it runs. Here is only a backstop for an
    environment that blocks its event loop, which nothing there can end.
    """

    def __init__(
        self,
        actor: EnvironmentActor,
        generators: GeneratorRouter,
        *,
        group_size: int,
        timeouts: TimeoutSection,
    ) -> None:
        self._actor = actor
        self._generators = generators
        self._group_size = group_size
        # After an episode's last turn its group is stored.
        self._backstop_s = timeouts.episode_s + timeouts.generate_s

    async def sample(
        self, group_id: int, task: Task, *, seed: int | None
    ) -> SampledGroup | RefusedGroup | CancelledGroup:
        """Sample and score the group of a task; its arrays stay with the generator until freed."""
        with self._generators.pinned(self._group_size) as rank:
            try:
                async with self._backstop(f"running the episodes of group {group_id}"):
                    return await self._actor.run_group.call_one(group_id, task, self._group_size, rank, seed)
            except DeadlineExceeded as error:
                await self._generators.drop_episodes(rank, group_id)
                return RefusedGroup(problem=str(error), reason=DropReason.EPISODE_FAILED)

    async def score(self, task: Task, *, sampling: SamplingSection, seed: int | None) -> Score | Unscored:
        """Score one episode that is not trained on."""
        what = f"the episode of held-out problem {task.task_id}"
        with self._generators.pinned(1) as rank:
            try:
                async with self._backstop(f"running {what}"):
                    result = await self._actor.evaluate.call_one(task, rank, sampling, seed)
            except DeadlineExceeded as error:
                return Unscored(reason=str(error))
        if isinstance(result, RefusedGroup):
            return Unscored(reason=f"{what} failed: {result.problem}")
        return result.score

    def _backstop(self, call: str) -> AbstractAsyncContextManager[None]:
        key = "timeouts.episode_s + timeouts.generate_s"
        return deadline(self._backstop_s, call=call, key=key)
