"""The environment actor: a thin shell around the episodes of one environment.

Runs episodes for the collecting loop and for evaluation. Has the generator that a group is pinned to sample
the model's turns; token ids go there, and texts come back. Calls overlap freely.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from monarch.actor import Actor, concurrent_endpoint, current_rank

from forgeasync.actors.generator import CancelledGroup, GeneratorActor, RefusedGroup
from forgeasync.buffer.decisions import DropReason
from forgeasync.config.generator import SamplingSection
from forgeasync.config.run import TimeoutSection
from forgeasync.environments.episodes import (
    EpisodeFailed,
    EpisodeResult,
    Episodes,
    EpisodesCancelled,
    SampleEpisodeTurn,
)
from forgeasync.observability.logs import redirect_process_output
from forgeasync.rollouts.rollout import StoredRollout
from forgeasync.rollouts.task import Task
from forgeasync.rollouts.trajectory import EpisodeId, SampledTurn
from forgeasync.schema.python_code import PythonCode
from forgeasync.waiting import deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSetup:
    """Everything that the environment of a run is started with."""

    environment: PythonCode
    model_path: Path
    chat_template: bool
    sampling: SamplingSection
    max_context_length: int
    timeouts: TimeoutSection


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup:
    """The rollouts of a group; what an environment sampled comes with one result for each of them."""

    rollouts: tuple[StoredRollout, ...]
    results: tuple[EpisodeResult, ...] | None = None
    """Results of the episodes; None if the scorer still has to score the rollouts."""


class EnvironmentActor(Actor):
    """One environment in one proc."""

    def __init__(self, log_dir: Path) -> None:
        redirect_process_output(log_dir / f"environment-{current_rank().rank}.log")
        self._num_evaluated = 0

    @concurrent_endpoint
    async def setup(self, setup: EnvironmentSetup) -> None:
        """Build the environment and load the tokenizer.

        Raises:
            ValueError: the environment cannot be built here, though it could where the run was checked.
        """
        from transformers import AutoTokenizer

        from forgeasync.environments.build import build_environment
        from forgeasync.environments.conversation import MessageRenderer

        self._setup = setup
        tokenizer = AutoTokenizer.from_pretrained(setup.model_path)
        self._episodes = Episodes(
            build_environment(setup.environment),
            MessageRenderer(tokenizer, chat_template=setup.chat_template),
            name=setup.environment.factory,
            max_context_length=setup.max_context_length,
            limit_s=setup.timeouts.episode_s,
        )

    @concurrent_endpoint
    async def connect(self, generators: GeneratorActor) -> None:
        """Set the generators that sample the model's turns."""
        self._generators = generators

    @concurrent_endpoint
    async def run_group(
        self, group_id: int, task: Task, num_episodes: int, generator_rank: int, seed: int | None
    ) -> SampledGroup | RefusedGroup | CancelledGroup:
        """Run the episodes of a group and have their arrays stored; a group that fails leaves nothing."""
        generator = self._generators.slice(procs=generator_rank)
        try:
            results = await self._run(
                group_id, task, num_episodes, generator_rank, self._setup.sampling, seed
            )
        except EpisodesCancelled:
            await generator.drop_episodes.call_one(group_id)
            return CancelledGroup()
        except EpisodeFailed as error:
            await generator.drop_episodes.call_one(group_id)
            return RefusedGroup(problem=f"group {group_id}: {error}", reason=DropReason.EPISODE_FAILED)
        stored: tuple[StoredRollout, ...] | RefusedGroup = await generator.store_episodes.call_one(
            group_id, [result.is_truncated for result in results]
        )
        return stored if isinstance(stored, RefusedGroup) else SampledGroup(rollouts=stored, results=results)

    @concurrent_endpoint
    async def evaluate(
        self, task: Task, generator_rank: int, sampling: SamplingSection, seed: int | None
    ) -> EpisodeResult | RefusedGroup:
        """Run one episode that is not trained on."""
        self._num_evaluated += 1
        group_id = -self._num_evaluated
        try:
            (result,) = await self._run(group_id, task, 1, generator_rank, sampling, seed)
        except EpisodeFailed as error:
            return RefusedGroup(problem=str(error), reason=DropReason.EPISODE_FAILED)
        finally:
            await self._generators.slice(procs=generator_rank).drop_episodes.call_one(group_id)
        return result

    def _run(
        self,
        group_id: int,
        task: Task,
        num_episodes: int,
        generator_rank: int,
        sampling: SamplingSection,
        seed: int | None,
    ) -> Awaitable[tuple[EpisodeResult, ...]]:
        return self._episodes.run(
            task,
            group_id=group_id,
            num_episodes=num_episodes,
            max_turn_tokens=sampling.max_response_tokens,
            sample=self._sample_turns(generator_rank, sampling, seed),
        )

    def _sample_turns(
        self, generator_rank: int, sampling: SamplingSection, seed: int | None
    ) -> SampleEpisodeTurn:
        generator = self._generators.slice(procs=generator_rank)
        limit_s = self._setup.timeouts.generate_s

        async def sample(episode: EpisodeId, given_ids: np.ndarray, max_tokens: int) -> SampledTurn | None:
            call = f"generator {generator_rank} sampling a turn of group {episode.group_id}"
            async with deadline(limit_s, call=call, key="timeouts.generate_s"):
                turn: SampledTurn | CancelledGroup = await generator.continue_episode.call_one(
                    episode, given_ids, sampling, max_tokens, seed
                )
            return None if isinstance(turn, CancelledGroup) else turn

        return sample
