"""What engines computed for something, and for how long they had sequences meanwhile."""

from collections.abc import Sequence

from forgeasync.actors import GeneratorPool
from forgeasync.generator import EngineStats
from forgeasync.profiling.engine_fit import Load
from forgeasync.profiling.processor_time import ProcessorTime
from forgeasync.profiling.sampled_groups import Sampled


class EngineLoads:
    """Measures one load after the other."""

    def __init__(self, pool: GeneratorPool, pids: Sequence[int], *, engine_cores: float) -> None:
        """``pids`` are the engines' processes; ``engine_cores`` is what one engine keeps busy alone."""
        self._pool = pool
        self._time = ProcessorTime(pids)
        self._engine_cores = engine_cores
        self._before: list[EngineStats] = []

    async def begin(self) -> None:
        """A load begins."""
        self._before = await self._stats()
        self._time.passed_s()

    async def end(self, batches: Sequence[Sequence[Sampled]]) -> Load:
        """A load has ended, with these batches."""
        passed_s = self._time.passed_s()
        busy_s = handing_over_s = 0.0
        for before, after in zip(self._before, await self._stats(), strict=True):
            busy_s += after.busy_s - before.busy_s
            handing_over_s += after.handing_over_s - before.handing_over_s
        return Load(
            batches=batches,
            computed_s=max(0.0, passed_s - handing_over_s),
            handing_over_s=handing_over_s,
            busy_s=busy_s,
            engine_cores=self._engine_cores,
        )

    async def _stats(self) -> list[EngineStats]:
        return [await one.actor.stats.call_one() for one in self._pool.replicas]
