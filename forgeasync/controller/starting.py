"""Starts the processes of a config and connects them.

start_roles       for a run: trainer, generators, scorer, buffer, environment and teachers
Fleet             for a training loop of your own: the same roles without a buffer
start_sampling    for an evaluation without a run: the processes that sample and score
"""

import asyncio
import dataclasses
import itertools
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from forgeasync.algorithms import Loss
from forgeasync.checkpoints import step_of
from forgeasync.config import (
    Fidelity,
    OnBadStep,
    RunConfig,
    average_alpha,
    is_served,
    max_token_age,
    named_sources,
    sleeps,
)
from forgeasync.controller.evaluation import LocalModel, PreparedEvaluation, evaluate
from forgeasync.controller.hosts import open_hosts
from forgeasync.controller.preparation import HELD_OUT, Prepared, prepare
from forgeasync.environments import response_of, sampling_seed, weighted_order
from forgeasync.observability import (
    FaultLog,
    HeldOutScores,
    ProcessListFile,
    RunDir,
    StepConsole,
    default_run_dir,
)
from forgeasync.planning import pair_cost, trainer_gpu_share
from forgeasync.rollouts import Group, PromptEncoder, Score, StoredRollout, Task, steps_of
from forgeasync.runtime import (
    TEACHER_HOST,
    EndpointResponses,
    EnvironmentPool,
    GeneratorRouter,
    GroupEpisodes,
    GroupSampler,
    GroupScoring,
    NoTrajectories,
    ProcessManager,
    RefusedGroup,
    RemoteBuffer,
    ResponseGroups,
    SampledGroup,
    TeacherFailure,
    Teachers,
    TrainerMesh,
    TrainerRecovery,
    Unscored,
    agent_roles,
    build_hosts,
    connect_weights,
    start_buffer,
    start_environment,
    start_generators,
    start_scorer,
    start_teachers,
    start_trainer,
)
from forgeasync.schema import Problem, raise_if_any
from forgeasync.trainer import (
    StepResult,
    TrainerSetup,
    TrainingItem,
    assign_rows,
    items_of,
    steps_problem,
    training_items,
    whole_response,
)
from forgeasync.weights import NUM_SLOTS, Manifest

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles of a run, which are other processes, and the run's log of faults."""

    trainer: TrainerRecovery
    generators: GeneratorRouter
    scorer: GroupScoring
    buffer: RemoteBuffer
    groups: GroupSampler
    teaching: Teachers
    faults: FaultLog


def open_process_manager(config: RunConfig, run_dir: RunDir, console: StepConsole) -> ProcessManager:
    """Return the manager of a run's processes, without starting any."""
    logs = run_dir.logs.resolve()
    return ProcessManager(
        logs,
        build_hosts(config, logs),
        faults=FaultLog(run_dir.faults.resolve(), console.message),
        listing=ProcessListFile(run_dir.procs.resolve()),
    )


async def start_roles(
    config: RunConfig, prepared: Prepared, manager: ProcessManager, console: StepConsole, run_dir: RunDir
) -> Roles:
    """Start the processes of all roles concurrently, and connect them.

    ``run_dir`` has the paths of the ledger, of files that episodes keep, and of the serving address.
    """
    resumed = prepared.resumed
    setup = dataclasses.replace(
        trainer_setup(prepared, config.algorithm),
        resume_from=None if resumed is None else resumed.folder,
        bad_steps=run_dir.bad_steps.resolve(),
    )
    has_environment = config.environment is not None
    counts = {
        "trainer": config.trainer.parallel.num_procs,
        "generator": config.generator.num_replicas,
        "scorer": config.scorer.num_replicas,
        "buffer": 1,
        "environment": config.episodes.num_workers if has_environment else 0,
    }
    console.phase(
        "starting processes: " + ", ".join(f"{number} {role}" for role, number in counts.items() if number),
        num_parts=5 if has_environment else 4,
    )
    async with asyncio.TaskGroup() as starting:

        def begin(name: str, start: Coroutine[Any, Any, T], *, is_logged: bool = True) -> asyncio.Task[T]:
            task = starting.create_task(start)
            if is_logged:
                task.add_done_callback(partial(_tell_ready, console, name))
            return task

        trainer_task = begin("trainer", start_trainer(manager, setup, config.timeouts))
        starting_generators = start_generators(
            manager, config, prepared.facts, prepared.model_path, starting_trainer=trainer_task
        )
        generators_task = begin("generators", starting_generators)
        scorer_task = begin("scorer", start_scorer(manager, config))
        resumed_buffer = None if resumed is None else resumed.buffer
        starting_buffer = start_buffer(manager, config, run_dir.ledger.resolve(), resumed_buffer)
        buffer_task = begin("buffer", starting_buffer)
        environment_task = begin(
            "environment",
            start_environment(
                manager,
                config,
                prepared.model_path,
                console.message,
                artifacts=run_dir.artifacts.resolve(),
                serving_file=run_dir.serving.resolve(),
            ),
            is_logged=has_environment,
        )
    trainer, generators, scorer = trainer_task.result(), generators_task.result(), scorer_task.result()
    if config.teachers:
        console.phase(f"starting {', '.join(f'teacher {name}' for name in config.teachers)}")
    teaching = await start_teachers(manager, config, prepared.facts, prepared.prompts)
    console.phase("connecting the trainer's weights to the generators")
    await trainer.connect(generators)
    moving = teaching.moving
    versions = run_dir.versions.resolve()
    for words in await connect_weights(manager, config, trainer, generators, moving, versions):
        console.message(words)
    groups = await connect_groups(config, prepared.prompts, environment_task.result(), generators, scorer)
    console.end_phase()
    recovery = TrainerRecovery(
        manager,
        setup,
        config.timeouts,
        trainer=trainer,
        generators=generators,
        teachers=moving,
        first_version=0 if resumed is None else resumed.state.step,
        tell=console.message,
    )
    await recovery.start()
    manager.faults.recover_earlier(f"came back as process {os.getpid()}")
    return Roles(
        trainer=recovery,
        generators=generators,
        scorer=scorer,
        buffer=buffer_task.result(),
        groups=groups,
        teaching=teaching,
        faults=manager.faults,
    )


def _tell_ready(console: StepConsole, name: str, starting: asyncio.Task[object]) -> None:
    """Show that a role is ready, unless its start failed, which is reported elsewhere."""
    if not starting.cancelled() and starting.exception() is None:
        console.message(f"{name} ready")
        console.part_done()


def trainer_setup(prepared: Prepared, loss: Loss) -> TrainerSetup:
    """Return the setup of a new run's trainer."""
    config = prepared.config
    return TrainerSetup(
        section=config.trainer,
        facts=prepared.facts,
        temperature=config.sampling.temperature,
        loss=loss,
        seed=config.seed,
        checkpoint=prepared.model_path,
        max_token_age=max_token_age(config),
        is_bitwise=config.fidelity is Fidelity.BITWISE,
        lora=config.lora,
        average_alpha=average_alpha(config.teachers),
        gpu_share=trainer_gpu_share(config, prepared.facts),
        empties_cache=sleeps(config),
    )


async def connect_groups(
    config: RunConfig,
    prompts: PromptEncoder,
    environment: EnvironmentPool | None,
    generators: GeneratorRouter,
    scorer: GroupScoring,
) -> GroupSampler:
    """Return the sampler of the run's groups: episodes of its environment, or responses of the generators."""
    if environment is not None:
        await environment.connect(generators.known)
        generators.pool.add_listener(environment.generators_changed)
        return _episodes(config, environment, generators)
    return ResponseGroups(
        generators,
        scorer,
        prompts,
        group_size=config.algorithm.group_size,
        sampling=config.sampling,
    )


def _episodes(
    config: RunConfig, environment: EnvironmentPool, generators: GeneratorRouter | NoTrajectories
) -> GroupEpisodes:
    return GroupEpisodes(
        environment,
        # NoTrajectories has the methods of a router that are called when nothing is trained.
        generators,  # type: ignore[arg-type]
        roles=agent_roles(config.agents),
        group_size=config.algorithm.group_size,
        sampling=config.sampling,
        section=config.episodes,
        max_lost_per_group=config.generator.max_lost_per_group,
        keeps_texts=config.serving.keep_texts or not is_served(config),
    )


@asynccontextmanager
async def start_sampling(
    prepared: PreparedEvaluation, manager: ProcessManager, console: StepConsole, *, artifacts: Path
) -> AsyncIterator[GroupSampler]:
    """Start the processes that sample and score an evaluation without a run.

    These are generators for a model in a folder, workers for an environment, and a scorer. ``artifacts`` is
    the folder for files that episodes keep.
    """
    config, model = prepared.config, prepared.model
    console.phase("starting")
    await manager.open(console.message)
    if isinstance(model, LocalModel):
        generators, scorer, environment = await asyncio.gather(
            start_generators(manager, config, model.facts, model.path),
            start_scorer(manager, config),
            start_environment(manager, config, model.path, console.message, artifacts=artifacts),
        )
        console.end_phase()
        yield await connect_groups(config, model.prompts, environment, generators, scorer)
    elif config.environment is not None:
        environment = await start_environment(
            manager, config, Path(), console.message, artifacts=artifacts, endpoint=model
        )
        assert environment is not None, "the config has an environment"
        console.end_phase()
        yield _episodes(config, environment, NoTrajectories())
    else:
        scorer = await start_scorer(manager, config)
        console.end_phase()
        system_prompt, limit_s = config.data.system_prompt, config.timeouts.generate_s
        responses = EndpointResponses(model, scorer, system_prompt=system_prompt, limit_s=limit_s)
        try:
            yield responses
        finally:
            await responses.close()


class Fleet:
    """The processes of a config, started and connected, for your own training loop.

    Nothing runs by itself: your loop samples, trains and publishes in its own order. Generators sample with
    the last published weights. Teachers, if the config has any, evaluate every sampled group. To train and
    sample concurrently, with a replay buffer in between, see apps/grpo.py.

        async with fa.Fleet.start(config) as fleet:
            groups = await fleet.sample(fleet.next_tasks(24))
            await fleet.train(fleet.items(groups))
            await fleet.free(groups)
            await fleet.publish()

    Use ``trainer``, ``generators`` and ``scorer`` for anything that these methods do not do.
    """

    def __init__(
        self,
        prepared: Prepared,
        trainer: TrainerMesh,
        generators: GeneratorRouter,
        scorer: GroupScoring,
        groups: GroupSampler,
        teaching: Teachers,
    ) -> None:
        self.config = prepared.config
        self.trainer = trainer
        self.generators = generators
        self.scorer = scorer
        self.problems: list[str] = []
        """Reason of each group that could not be sampled, scored or evaluated by its teacher."""
        self._prepared = prepared
        self._groups = groups
        self._teaching = teaching
        weights = {source.name: source.weight for source in named_sources(self.config.data)}
        self._order = weighted_order(prepared.train, weights, seed=self.config.seed, position=0)
        self._group_ids = itertools.count()
        self._num_steps = self._served_version = 0
        self.newest: Manifest | None = None
        """Last published version; None if it is what the generators began with."""

    @classmethod
    @asynccontextmanager
    async def start(
        cls, config: RunConfig, *, loss: Loss | None = None, resume_from: Path | None = None
    ) -> AsyncIterator["Fleet"]:
        """Check the config, start its processes, and end them when the ``async with`` block ends.

        Logs of the processes are in the run's folder.

        Args:
            config: Config of the run.
            loss: Loss in place of that of ``config.algorithm``.
            resume_from: Folder of a checkpoint with which the trainer begins. Call ``publish`` to give its
                weights to the generators.

        Raises:
            ConfigError: The config is wrong. The message lists all problems, before any process starts.
            ActorDied: A process has died; inside an exception group if that happens during the block.
        """
        raise_if_any(_unused(config))
        if loss is not None:
            _check_loss(loss, config)
        prepared = prepare(config)
        config = prepared.config
        folder = default_run_dir(config.name, datetime.now()) if config.run_dir is None else config.run_dir
        run_dir = RunDir(path=Path(folder).resolve())
        logs = run_dir.logs
        logs.mkdir(parents=True, exist_ok=True)
        processes = ProcessManager(logs, build_hosts(config, logs))
        setup = dataclasses.replace(
            trainer_setup(prepared, config.algorithm if loss is None else loss),
            bad_steps=run_dir.bad_steps,
            resume_from=resume_from,
        )
        try:
            async with processes.naming_deaths():
                for warning in prepared.warnings:
                    logger.warning("%s", warning)
                await open_hosts(config, prepared.facts, processes, tell=logger.warning)
                starting_trainer = asyncio.ensure_future(start_trainer(processes, setup, config.timeouts))
                generators, scorer, trainer, environment = await asyncio.gather(
                    start_generators(
                        processes,
                        config,
                        prepared.facts,
                        prepared.model_path,
                        starting_trainer=starting_trainer,
                    ),
                    start_scorer(processes, config),
                    starting_trainer,
                    start_environment(processes, config, prepared.model_path, logger.warning),
                )
                teaching = await start_teachers(processes, config, prepared.facts, prepared.prompts)
                await trainer.connect(generators)
                generators.pool.add_listener(lambda: trainer.generators_changed(generators))
                for words in await connect_weights(processes, config, trainer, generators, teaching.moving):
                    logger.info("%s", words)
                groups = await connect_groups(config, prepared.prompts, environment, generators, scorer)
            async with asyncio.TaskGroup() as watching:
                fleet = cls(prepared, trainer, generators, scorer, groups, teaching)
                fleet._num_steps = 0 if resume_from is None else step_of(resume_from) or 0
                loops = [
                    processes.watch(),
                    *(fleet._take_versions(generators, host) for host in range(generators.num_hosts)),
                    *(fleet._take_versions(one, TEACHER_HOST) for one in teaching.moving),
                ]
                tasks = [watching.create_task(loop) for loop in loops]
                yield fleet
                for task in tasks:
                    task.cancel()
        finally:
            await processes.close()

    def next_tasks(self, num_tasks: int) -> list[Task]:
        """Return the next training tasks in the data's order, which is reshuffled for every pass."""
        return [self._order.next() for _ in range(num_tasks)]

    async def sample(self, tasks: Iterable[Task]) -> list[Group]:
        """Sample and score a group of ``algorithm.group_size`` rollouts for each task, concurrently.

        Teachers, if any, then evaluate the groups. Groups for which a stage failed are left out, and their
        reasons are appended to ``problems``. The arrays of the others stay in the payload store
        (``payload.capacity_gib``) until you call ``free``.
        """
        groups = await asyncio.gather(*(self._sample(task) for task in tasks))
        return [group for group in groups if group is not None]

    async def _sample(self, task: Task) -> Group | None:
        group_id = next(self._group_ids)
        answer = await self._groups.sample(group_id, task, seed=sampling_seed(self.config.seed, group_id))
        if isinstance(answer, RefusedGroup):
            self.problems.append(answer.problem or f"group {group_id} was not scored")
            return None
        scores = await self._scores(group_id, task, answer)
        if isinstance(scores, Unscored):
            await self.generators.free_payloads(answer.rollouts)
            self.problems.append(scores.reason)
            return None
        group = Group(
            group_id=group_id,
            draw_id=group_id,
            task=task,
            rollouts=answer.rollouts,
            rewards=tuple(score.value for score in scores),
            scores=scores,
        )
        problem = steps_problem(group, scores, self.config.algorithm)
        if problem is None:
            taught = await self._teaching.teach(group_id, task, answer.rollouts, scores)
            if not isinstance(taught, TeacherFailure):
                if taught is not answer.rollouts:
                    # The teacher wrote the group to a new payload file.
                    await self.generators.free_payloads(answer.rollouts)
                return dataclasses.replace(group, rollouts=taught, steps=steps_of(scores))
            problem = taught.problem
        await self.generators.free_payloads(answer.rollouts)
        self.problems.append(problem)
        return None

    async def _scores(self, group_id: int, task: Task, sampled: SampledGroup) -> tuple[Score, ...] | Unscored:
        if sampled.scores is not None:
            return sampled.scores
        responses = [response_of(rollout) for rollout in sampled.rollouts]
        return await self.scorer.score_group(group_id, task, responses)

    def items(self, groups: Sequence[Group]) -> list[TrainingItem]:
        """Return training items for groups, with the advantages of ``algorithm.advantage``."""
        return training_items(groups, [1.0] * len(groups), self.config.algorithm)

    def imitate(self, rollouts: Iterable[StoredRollout]) -> list[TrainingItem]:
        """Return training items that make rollouts more likely: each token has advantage 1."""
        return [item for rollout in rollouts for item in items_of(rollout, whole_response(1.0), weight=1.0)]

    async def train(self, items: Sequence[TrainingItem]) -> StepResult:
        """Make one optimizer step on ``items``.

        Raises:
            ValueError: ``items`` is empty.
        """
        if not items:
            raise ValueError("items is empty; an optimizer step needs at least one item")
        trainer = self.config.trainer
        rows = assign_rows(
            items,
            tokens_per_row=trainer.tokens_per_row,
            num_ranks=self.trainer.num_data_ranks,
            share_prefixes=trainer.shares_prefixes,
            routing_replay=trainer.routing_replay,
            pair_cost=pair_cost(self._prepared.facts),
        )
        self._num_steps += 1
        return await self.trainer.train_items([rows], step=self._num_steps)

    async def publish(self) -> int:
        """Update every generator to the trainer's current weights; return their version.

        Also waits until every moving teacher has the weights that are due for it.
        """
        if self._num_steps == self._served_version:
            return self._served_version
        manifest = self.newest = await self.trainer.stage_weights(self._num_steps % NUM_SLOTS)
        self.generators.published(manifest.version)
        for teacher in self._teaching.moving:
            teacher.published(manifest.version)
        await self.generators.until_all_have(manifest.version)
        for teacher in self._teaching.moving:
            await teacher.until_current(manifest.version)
        self._served_version = manifest.version
        return manifest.version

    async def _take_versions(self, engines: GeneratorRouter, host: int) -> None:
        """Update the engines of a host to the last published version, including those that join later."""
        while True:
            await engines.until_behind(host)
            manifest = self.newest
            assert manifest is not None, "nothing is newer than what the engines began with"
            # If the trainer overwrites the version meanwhile, the fetch is incomplete and repeated.
            fetched = await engines.begin_update(host, manifest)
            if fetched is not None and fetched.is_complete:
                for number, swap in (await engines.finish_update(host, manifest.version)).items():
                    engines.record_swap(number, swap)

    @property
    def teacher_metrics(self) -> dict[str, float]:
        """Counts of the teachers since the start, by metric name; empty without teachers."""
        return self._teaching.metrics()

    async def evaluate(self) -> HeldOutScores:
        """Score one response to each held-out problem, sampled with the last published weights."""
        return await evaluate(self._prepared.sets[HELD_OUT], self._groups)

    async def free(self, groups: Iterable[Group]) -> None:
        """Free the arrays of groups in the payload store."""
        await self.generators.free_payloads(rollout for group in groups for rollout in group.rollouts)

    async def export(self, folder: str | Path) -> None:
        """Write the trainer's weights to a Hugging Face folder, which must not exist yet."""
        await self.trainer.save_hf(Path(folder).resolve(), source=self._prepared.model_path)


def _unused(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that only apps.grpo acts on, and that a Fleet would ignore."""
    algorithm, trainer, evaluation = config.algorithm, config.trainer, config.evaluation
    bad_steps, acted_on = trainer.bad_steps, (None, OnBadStep.SKIP)
    for field, value, is_set in (
        ("algorithm.filters", algorithm.filters, bool(algorithm.filters)),
        ("trainer.steps_per_batch", trainer.steps_per_batch, trainer.steps_per_batch != 1),
        ("trainer.bad_steps.on_nan", bad_steps.on_nan, bad_steps.on_nan not in acted_on),
        ("trainer.bad_steps.on_spike", bad_steps.on_spike, bad_steps.on_spike not in acted_on),
        ("weights.archive", config.weights.archive, config.weights.archive),
        ("evaluation.sets", [one.name for one in evaluation.sets], bool(evaluation.sets)),
    ):
        if is_set:
            remedy = "must be left out: Fleet ignores it; implement it in your training loop"
            yield Problem(field=field, value=value, remedy=remedy)


def _check_loss(loss: Loss, config: RunConfig) -> None:
    """Raise ValueError if a loss needs other data from teachers than ``config.algorithm`` does."""
    found, required = (
        (one.needs_teacher, one.num_teacher_ids if one.needs_teacher else 0, one.needs_student_ids)
        for one in (loss, config.algorithm)
    )
    if found != required:
        needs, num_ids, are_students = required
        ids = "ids of the policy's" if are_students else "likeliest ids"
        words = f"a teacher's {num_ids} {ids} a token" if needs else "no teacher"
        raise ValueError(
            f"loss: its terms must need {words}, as algorithm.terms of the config does: the run's teachers "
            "compute only that"
        )
