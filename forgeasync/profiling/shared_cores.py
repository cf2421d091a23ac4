"""What procs cost each other where they share cores: the same work beside others and without them, in turn.

A machine that others use as well becomes faster and slower within minutes, by as much as is to be found. So
each is measured twice, around what it is compared with.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from forgeasync.config.run import RunConfig
from forgeasync.controller.starting import Roles
from forgeasync.profiling.engine_loads import EngineLoads
from forgeasync.profiling.engine_rest import Load, together
from forgeasync.profiling.processor_time import ProcessorTime
from forgeasync.profiling.sampled_groups import Sampled, score_until
from forgeasync.profiling.step_times import Beside, mean_of, train_beside


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCores:
    """Engines and the trainer beside each other, and each without the other."""

    crowded: Load
    """Whole batches, beside the trainer and scorers."""
    uncrowded: Load
    """Whole batches, between the two halves of the former."""
    trainer: Beside

    @property
    def trainer_share(self) -> float:
        """``Cores.trainer_share``."""
        return min(1.0, self.trainer.core_share / self.crowded.core_share)


async def share_cores(
    config: RunConfig,
    roles: Roles,
    scored: Sequence[Sampled],
    sample: Callable[[], Awaitable[list[list[Sampled]]]],
    of_engines: EngineLoads,
    of_trainer: ProcessorTime,
    *,
    first_step: int,
) -> SharedCores:
    """Sample beside a trainer that makes steps and scorers that score, without these, and beside them again.

    ``scored`` is what is trained on and scored; ``first_step`` is the number of the first step.
    """

    async def sample_alone() -> Load:
        await of_engines.begin()
        return await of_engines.end(await sample())

    async def sample_beside_scorers() -> Load:
        done = asyncio.Event()
        scoring = asyncio.create_task(score_until(done, roles.scorer, scored))
        try:
            return await sample_alone()
        finally:
            done.set()
            await scoring

    numbers = itertools.count(first_step)
    groups = [one.group for one in scored]

    async def crowd() -> tuple[Load, Beside]:
        return await train_beside(
            config, roles.trainer, groups, sample_beside_scorers, of_trainer, numbers=numbers
        )

    before, steps_before = await crowd()
    uncrowded = await sample_alone()
    after, steps_after = await crowd()
    return SharedCores(
        crowded=together([before, after]),
        uncrowded=uncrowded,
        trainer=mean_of([steps_before, steps_after]),
    )
