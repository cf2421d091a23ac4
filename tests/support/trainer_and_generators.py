"""A trainer and generators of one config as real processes, without the rest of a run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from forgeasync.config import RunConfig
from forgeasync.runtime import (
    GeneratorRouter,
    LocalHosts,
    ProcessManager,
    TrainerMesh,
    start_generators,
    start_trainer,
)
from tests.support.trainers import make_setup


@asynccontextmanager
async def both_running(
    config: RunConfig,
    folder: Path,
    logs: Path,
    *,
    trainer_host: str = "host-0",
    average_alpha: float | None = None,
) -> AsyncIterator[tuple[ProcessManager, TrainerMesh, GeneratorRouter]]:
    """Started side by side from the model in ``folder``; their weights are not connected yet."""
    setup = make_setup(
        folder,
        config.trainer,
        temperature=config.sampling.temperature,
        lora=config.lora,
        average_alpha=average_alpha,
    )
    processes = ProcessManager(logs, LocalHosts(trainer_id=trainer_host))
    try:
        async with asyncio.TaskGroup() as starting:
            generators = starting.create_task(start_generators(processes, config, setup.facts, folder))
            trainer = starting.create_task(start_trainer(processes, setup, config.timeouts))
        yield processes, trainer.result(), generators.result()
    finally:
        await processes.close()
