"""The procs of a run: all roles started side by side, and connected."""

import asyncio
import dataclasses
import os
from dataclasses import dataclass
from functools import partial

from forgeasync.actors import (
    BufferActor,
    EnvironmentPool,
    GeneratorRouter,
    GroupEpisodes,
    GroupSampler,
    GroupScoring,
    ProcessManager,
    ResponseGroups,
    Teaching,
    TrainerMesh,
    TrainerRecovery,
    agent_roles,
    connect_weights,
    start_buffer,
    start_environment,
    start_generators,
    start_recovery,
    start_scorer,
    start_teachers,
    start_trainer,
)
from forgeasync.algorithms import Loss
from forgeasync.config import AgeOf, RunConfig, average_alpha, is_served
from forgeasync.controller.preparation import Prepared
from forgeasync.faults import FaultLog
from forgeasync.launch import build_hosts
from forgeasync.observability import ProcsFile, RunDir, StepConsole
from forgeasync.rollouts import PromptEncoder
from forgeasync.trainer import TrainerSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles of a run, each with the object that fills it."""

    trainer: TrainerRecovery
    generators: GeneratorRouter
    scorer: GroupScoring
    buffer: BufferActor
    groups: GroupSampler
    teaching: Teaching
    faults: FaultLog
    """What has failed so far, and what came back."""


def open_procs(config: RunConfig, run_dir: RunDir, console: StepConsole) -> ProcessManager:
    """Return what will hold all procs of a run; none is started yet."""
    logs = run_dir.logs.resolve()
    return ProcessManager(
        logs,
        build_hosts(config, logs),
        faults=FaultLog(run_dir.faults.resolve(), console.message),
        listing=ProcsFile(run_dir.procs.resolve()),
    )


async def start_roles(
    config: RunConfig, prepared: Prepared, manager: ProcessManager, console: StepConsole, run_dir: RunDir
) -> Roles:
    """Start and set up the procs of all roles, and let the trainer's weights reach the generators.

    ``run_dir`` has the folder for files that episodes keep, the ledger, and where people are served.
    """
    _say_what_starts(config, console)
    resumed = prepared.resumed
    setup = dataclasses.replace(
        trainer_setup(prepared, config.algorithm),
        max_token_age=config.max_off_policy_steps if config.buffer.age_of is AgeOf.TOKEN else None,
        resume_from=None if resumed is None else resumed.folder,
        bad_steps=run_dir.bad_steps.resolve(),
    )
    started = await _start_side_by_side(config, prepared, setup, manager, console, run_dir)
    if config.teachers:
        console.phase(f"starting {', '.join(f'teacher {name}' for name in config.teachers)}")
    teaching = await start_teachers(manager, config, prepared.facts, prepared.prompts)
    console.phase("connecting the trainer's weights to the generators")
    await started.trainer.connect(started.generators)
    moving = teaching.moving
    for words in await connect_weights(manager, config, started.trainer, started.generators, moving):
        console.message(words)
    groups = await connect_groups(
        config, prepared.prompts, started.environment, started.generators, started.scorer
    )
    console.end_phase()
    recovery = await start_recovery(
        manager,
        setup,
        config.timeouts,
        trainer=started.trainer,
        generators=started.generators,
        teachers=[one.router for one in moving],
        first_version=0 if resumed is None else resumed.state.step,
        tell=console.message,
    )
    manager.faults.recover_earlier(f"came back as process {os.getpid()}")
    return Roles(
        trainer=recovery,
        generators=started.generators,
        scorer=started.scorer,
        buffer=started.buffer,
        groups=groups,
        teaching=teaching,
        faults=manager.faults,
    )


def _say_what_starts(config: RunConfig, console: StepConsole) -> None:
    has_environment = config.environment is not None
    num_scorers = config.scorer.num_replicas
    console.phase(
        f"starting {config.trainer.parallel.num_procs} trainer procs, "
        f"{config.generator.num_replicas} generators, "
        f"{num_scorers} scorer{'s' if num_scorers > 1 else ''}, 1 buffer"
        + (f", {config.episodes.num_workers} environment workers" if has_environment else ""),
        num_parts=5 if has_environment else 4,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """Roles whose procs are set up and do not know of each other yet."""

    generators: GeneratorRouter
    scorer: GroupScoring
    buffer: BufferActor
    environment: EnvironmentPool | None
    trainer: TrainerMesh


async def _start_side_by_side(
    config: RunConfig,
    prepared: Prepared,
    setup: TrainerSetup,
    manager: ProcessManager,
    console: StepConsole,
    run_dir: RunDir,
) -> _Started:
    resumed = prepared.resumed
    async with asyncio.TaskGroup() as starting:
        generators = starting.create_task(
            start_generators(manager, config, prepared.facts, prepared.model_path)
        )
        scorer = starting.create_task(start_scorer(manager, config))
        buffer = starting.create_task(
            start_buffer(
                manager,
                config,
                run_dir.ledger.resolve(),
                None if resumed is None else resumed.buffer,
            )
        )
        environment = starting.create_task(
            start_environment(
                manager,
                config,
                prepared.model_path,
                console.message,
                artifacts=run_dir.artifacts.resolve(),
                serving_file=run_dir.serving.resolve(),
            )
        )
        trainer = starting.create_task(start_trainer(manager, setup, config.timeouts))
        for name, role in (
            ("generators", generators),
            ("scorer", scorer),
            ("buffer", buffer),
            ("trainer", trainer),
            *([("environment", environment)] if config.environment is not None else []),
        ):
            role.add_done_callback(partial(_tell_ready, console, name))
    return _Started(
        generators=generators.result(),
        scorer=scorer.result(),
        buffer=buffer.result(),
        environment=environment.result(),
        trainer=trainer.result(),
    )


async def connect_groups(
    config: RunConfig,
    prompts: PromptEncoder,
    environment: EnvironmentPool | None,
    generators: GeneratorRouter,
    scorer: GroupScoring,
) -> GroupSampler:
    """Build what samples the run's groups: its environment, or the generators alone."""
    if environment is not None:
        await environment.connect(generators.known)
        generators.pool.follow(environment.generators_changed)
        return GroupEpisodes(
            environment,
            generators,
            roles=agent_roles(config.agents),
            group_size=config.algorithm.group_size,
            sampling=config.sampling,
            section=config.episodes,
            max_lost_per_group=config.generator.max_lost_per_group,
            keeps_texts=config.serving.keep_texts or not is_served(config),
        )
    return ResponseGroups(
        generators,
        scorer,
        prompts,
        group_size=config.algorithm.group_size,
        sampling=config.sampling,
    )


def trainer_setup(prepared: Prepared, loss: Loss) -> TrainerSetup:
    """Return everything that the trainer of a new run is started with."""
    config = prepared.config
    return TrainerSetup(
        section=config.trainer,
        facts=prepared.facts,
        temperature=config.sampling.temperature,
        loss=loss,
        seed=config.seed,
        checkpoint=prepared.model_path,
        lora=config.lora,
        average_alpha=average_alpha(config.teachers),
    )


def _tell_ready(console: StepConsole, name: str, starting: asyncio.Task[object]) -> None:
    """Say that a role is at work, unless its start has failed, which is told elsewhere."""
    if not starting.cancelled() and starting.exception() is None:
        console.message(f"{name} ready")
        console.part_done()
