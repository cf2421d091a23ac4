"""What engines computed for something, and how much of their cores they had meanwhile."""

from collections.abc import Sequence

from forgeasync.actors.generator_pool import GeneratorPool
from forgeasync.profiling.engine_rest import Load
from forgeasync.profiling.processor_time import ProcessorTime
from forgeasync.profiling.sampled_groups import Sampled


class EngineLoads:
    """Measures one load after the other."""

    def __init__(self, pool: GeneratorPool, pids: Sequence[int], *, engine_cores: float) -> None:
        """``pids`` are the engines' processes; ``engine_cores`` is what one engine keeps busy alone."""
        self._pool = pool
        self._time = ProcessorTime(pids)
        self._engine_cores = engine_cores
        self._busy_s = 0.0

    async def begin(self) -> None:
        """A load begins."""
        self._busy_s = await self._busy_so_far_s()
        self._time.passed_s()

    async def end(self, batches: Sequence[Sequence[Sampled]]) -> Load:
        """A load has ended, with these batches."""
        computed_s = self._time.passed_s()
        busy_s = await self._busy_so_far_s() - self._busy_s
        return Load(
            batches=batches,
            computed_s=computed_s,
            wanted_s=busy_s * self._engine_cores,
        )

    async def _busy_so_far_s(self) -> float:
        """Return the seconds in which engines have had sequences, of all engines together."""
        return sum([(await one.actor.stats.call_one()).busy_s for one in self._pool.replicas])
