"""The procs of a run: all roles started side by side, and connected."""

import asyncio
import dataclasses
from dataclasses import dataclass
from functools import partial

from forgeasync.actors.buffer import BufferActor
from forgeasync.actors.environment import EnvironmentActor
from forgeasync.actors.group_sampling import GroupSampler, ResponseGroups
from forgeasync.actors.group_scoring import GroupScoring
from forgeasync.actors.procs import Procs
from forgeasync.actors.router import GeneratorRouter
from forgeasync.actors.trainer_mesh import TrainerMesh
from forgeasync.algorithms.loss import Loss
from forgeasync.config.buffer import AgeOf
from forgeasync.config.run import RunConfig
from forgeasync.controller.preparation import Prepared
from forgeasync.observability.console import StepConsole
from forgeasync.trainer.setup import TrainerSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles of a run, each with the object that fills it."""

    trainer: TrainerMesh
    generators: GeneratorRouter
    scorer: GroupScoring
    buffer: BufferActor
    groups: GroupSampler


async def start_roles(config: RunConfig, prepared: Prepared, fleet: Procs, console: StepConsole) -> Roles:
    """Start and set up the procs of all roles, and let the trainer's weights reach the generators."""
    resumed = prepared.resumed
    num_trainer, num_generator = config.trainer.parallel.num_procs, config.generator.num_replicas
    has_environment = config.environment is not None
    console.phase(
        f"starting {num_trainer} trainer procs, {num_generator} generators, 1 scorer, 1 buffer"
        + (", 1 environment" if has_environment else ""),
        num_parts=5 if has_environment else 4,
    )
    setup = dataclasses.replace(
        trainer_setup(prepared, config.algorithm),
        max_token_age=config.max_off_policy_steps if config.buffer.age_of is AgeOf.TOKEN else None,
        resume_from=None if resumed is None else resumed.folder,
    )
    async with asyncio.TaskGroup() as starting:
        generators = starting.create_task(fleet.start_generators(config, prepared.facts, prepared.model_path))
        scorer = starting.create_task(fleet.start_scorer(config))
        buffer = starting.create_task(
            fleet.start_buffer(config, None if resumed is None else resumed.state.buffer)
        )
        environment = starting.create_task(fleet.start_environment(config, prepared.model_path))
        trainer = starting.create_task(fleet.start_trainer(setup, config.timeouts))
        for name, role in (
            ("generators", generators),
            ("scorer", scorer),
            ("buffer", buffer),
            ("trainer", trainer),
            *([("environment", environment)] if has_environment else []),
        ):
            role.add_done_callback(partial(_tell_ready, console, name))
    console.phase("connecting the trainer's weights to the generators")
    await trainer.result().connect(generators.result())
    for words in await fleet.connect_weights(config, trainer.result(), generators.result()):
        console.message(words)
    groups = await connect_groups(fleet, prepared, environment.result(), generators.result(), scorer.result())
    console.end_phase()
    return Roles(
        trainer=trainer.result(),
        generators=generators.result(),
        scorer=scorer.result(),
        buffer=buffer.result(),
        groups=groups,
    )


async def connect_groups(
    fleet: Procs,
    prepared: Prepared,
    environment: EnvironmentActor | None,
    generators: GeneratorRouter,
    scorer: GroupScoring,
) -> GroupSampler:
    """Build what samples the run's groups: its environment, or the generators alone."""
    config = prepared.config
    if environment is not None:
        return await fleet.connect_environment(config, environment, generators)
    return ResponseGroups(
        generators,
        scorer,
        prepared.prompts,
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
    )


def _tell_ready(console: StepConsole, name: str, starting: asyncio.Task[object]) -> None:
    """Say that a role is at work, unless its start has failed, which is told elsewhere."""
    if not starting.cancelled() and starting.exception() is None:
        console.message(f"{name} ready")
        console.part_done()
