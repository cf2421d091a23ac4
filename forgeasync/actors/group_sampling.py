"""Samples groups: single responses here, episodes of an environment in group_episodes.py."""

from typing import Protocol

from forgeasync.actors.environment import SampledGroup
from forgeasync.actors.generator import CancelledGroup, RefusedGroup
from forgeasync.actors.group_scoring import GroupScoring, Unscored
from forgeasync.actors.router import GeneratorRouter
from forgeasync.config.generator import SamplingSection
from forgeasync.rollouts.prompts import PromptEncoder
from forgeasync.rollouts.score import Score
from forgeasync.rollouts.task import Task


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
