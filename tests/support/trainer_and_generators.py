"""A trainer and generators of one config as real procs, without the rest of a run."""

import asyncio
from pathlib import Path

from forgeasync.algorithms import Loss
from forgeasync.config import RunConfig
from forgeasync.models import read_model_facts
from forgeasync.runtime import GeneratorRouter, ProcessManager, TrainerMesh, start_generators, start_trainer
from forgeasync.trainer import TrainerSetup


async def start_both(
    procs: ProcessManager, config: RunConfig, folder: Path, *, average_alpha: float | None = None
) -> tuple[TrainerMesh, GeneratorRouter]:
    """Start them side by side from the model in ``folder``; their weights are not connected yet."""
    facts = read_model_facts(str(folder))
    setup = TrainerSetup(
        section=config.trainer,
        facts=facts,
        temperature=config.sampling.temperature,
        loss=Loss(),
        seed=0,
        checkpoint=folder,
        lora=config.lora,
        average_alpha=average_alpha,
    )
    async with asyncio.TaskGroup() as starting:
        generators = starting.create_task(start_generators(procs, config, facts, folder))
        trainer = starting.create_task(start_trainer(procs, setup, config.timeouts))
    return trainer.result(), generators.result()
