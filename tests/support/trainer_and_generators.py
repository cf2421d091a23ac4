"""A trainer and generators of one config as real processes, without the rest of a run."""

import asyncio
from pathlib import Path

from forgeasync.config import RunConfig
from forgeasync.runtime import GeneratorRouter, ProcessManager, TrainerMesh, start_generators, start_trainer
from tests.support.trainers import make_setup


async def start_both(
    processes: ProcessManager, config: RunConfig, folder: Path, *, average_alpha: float | None = None
) -> tuple[TrainerMesh, GeneratorRouter]:
    """Start them side by side from the model in ``folder``; their weights are not connected yet."""
    setup = make_setup(
        folder,
        config.trainer,
        temperature=config.sampling.temperature,
        lora=config.lora,
        average_alpha=average_alpha,
    )
    async with asyncio.TaskGroup() as starting:
        generators = starting.create_task(start_generators(processes, config, setup.facts, folder))
        trainer = starting.create_task(start_trainer(processes, setup, config.timeouts))
    return trainer.result(), generators.result()
