"""Has groups sampled: single responses to a prompt. ``group_episodes`` has the episodes of an environment."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from forgeasync.actors.generator import CancelledGroup, RefusedGroup
from forgeasync.actors.group_scoring import GroupScoring, Unscored
from forgeasync.actors.router import GeneratorRouter, GroupGivenUp
from forgeasync.config import Ending, SamplingSection
from forgeasync.environments import response_record
from forgeasync.rollouts import EpisodeOutcome, PromptEncoder, Score, StoredRollout, Task, VersionRange


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup:
    """The rollouts of a group; what an environment sampled comes with their scores."""

    rollouts: tuple[StoredRollout, ...]
    scores: tuple[Score, ...] | None = None
    """One for each rollout; None if the scorer still has to score them."""
    durations_ms: tuple[int, ...] | None = None
    """How long the episode of each rollout took; None where rollouts are responses."""
    outcomes: tuple[EpisodeOutcome, ...] = ()
    """All attempts at the group's episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutRollout:
    """A response or an episode that is not trained on."""

    result: Score | Unscored
    versions: VersionRange | None = None
    """The policy versions that sampled it; None where it took no turn, or the model is not ours."""
    ending: Ending | None = None
    """How the last attempt at the episode ended; a response to one prompt has none."""
    num_turns: int = 1
    record: Mapping[str, Any] | None = None
    """The whole episode as JSON values; None where nobody asked for it."""


class GroupSampler(Protocol):
    """Samples the rollouts of a task, for training and for evaluation."""

    async def sample(
        self, group_id: int, task: Task, *, seed: int | None
    ) -> SampledGroup | RefusedGroup | CancelledGroup:
        """Sample the group of a task; its arrays stay with the generator until freed."""
        ...

    async def score(
        self, task: Task, *, sampling: SamplingSection, seed: int | None, keeps_record: bool = False
    ) -> HeldOutRollout:
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
        """Sample the group of a task; it still has to be scored, and responses that end early already are."""
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
            if isinstance(answer, RefusedGroup | CancelledGroup):
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
            (sampled,) = await self._generators.respond(
                self._prompts.encode(task.prompt), num_samples=1, sampling=sampling, seed=seed
            )
        except GroupGivenUp as given_up:
            return HeldOutRollout(result=Unscored(reason=f"held-out problem {task.task_id}: {given_up}"))
        scores = await self._scorer.score(f"held-out problem {task.task_id}", task, [sampled.response])
        result = scores if isinstance(scores, Unscored) else scores[0]
        record = None
        if keeps_record:
            score, problem = (None, result.reason) if isinstance(result, Unscored) else (result, None)
            record = response_record(task, sampled.response, score, problem, versions=sampled.versions)
        return HeldOutRollout(result=result, versions=sampled.versions, record=record)
