"""What procs have of the cores that they share: the same work beside others and without them, in turn.

A machine that others use as well becomes faster and slower within minutes, by as much as is to be found. So
each is measured twice, around what it is compared with.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from forgeasync.config import RunConfig
from forgeasync.controller import TrainerRecovery
from forgeasync.profile import MOST_LAG
from forgeasync.profiling.engine_fit import Load, together
from forgeasync.profiling.engine_loads import EngineLoads
from forgeasync.profiling.processor_time import MIN_OTHERS_SHARE, ProcessorTime
from forgeasync.profiling.sampled_groups import Sampled
from forgeasync.profiling.step_times import Beside, mean_of, train_beside


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCores:
    """Engines and the trainer beside each other, and each without the other."""

    crowded: Load
    """Whole batches that are sampled and scored, beside the trainer."""
    uncrowded: Load
    """Whole batches, between the two halves of the former."""
    trainer: Beside

    @property
    def trainer_lag(self) -> float:
        """``Cores.trainer_lag``; 0 where engines had next to all of their cores."""
        of_engines = self.crowded.core_share
        if 1.0 - of_engines < MIN_OTHERS_SHARE:
            return 0.0
        lag = (of_engines / self.trainer.core_share - 1.0) / (1.0 / of_engines - 1.0)
        return min(MOST_LAG, max(0.0, lag))


async def share_cores(
    config: RunConfig,
    trainer: TrainerRecovery,
    sampled: Sequence[Sampled],
    sample: Callable[[], Awaitable[list[list[Sampled]]]],
    of_engines: EngineLoads,
    of_trainer: ProcessorTime,
    *,
    numbers: Iterator[int],
) -> SharedCores:
    """Sample beside a trainer that makes steps, without it, and beside it again.

    ``sampled`` is what is trained on; ``numbers`` are those of the steps.
    """
    groups = [one.group for one in sampled]

    async def load() -> Load:
        await of_engines.begin()
        return await of_engines.end(await sample())

    async def crowd() -> tuple[Load, Beside]:
        return await train_beside(config, trainer, groups, load, of_trainer, numbers=numbers)

    before, steps_before = await crowd()
    uncrowded = await load()
    after, steps_after = await crowd()
    return SharedCores(
        crowded=together([before, after]),
        uncrowded=uncrowded,
        trainer=mean_of([steps_before, steps_after]),
    )
