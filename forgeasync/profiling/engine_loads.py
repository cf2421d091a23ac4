"""What engines computed for something, and how much of their cores they had meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass

from forgeasync.actors.generator_pool import GeneratorPool
from forgeasync.profiling.engine_rest import Load
from forgeasync.profiling.processor_time import ProcessorTime
from forgeasync.profiling.sampled_groups import Sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """Of all engines together."""

    busy_s: float
    """Seconds in which an engine has had sequences."""
    num_steps: int


class EngineLoads:
    """Measures one load after the other."""

    def __init__(self, pool: GeneratorPool, pids: Sequence[int], *, engine_cores: float) -> None:
        """``pids`` are the engines' processes; ``engine_cores`` is what one engine keeps busy alone."""
        self._pool = pool
        self._time = ProcessorTime(pids)
        self._engine_cores = engine_cores
        self._before = _Counted(busy_s=0.0, num_steps=0)

    async def begin(self) -> None:
        """A load begins."""
        self._before = await self._so_far()
        self._time.passed_s()

    async def end(self, batches: Sequence[Sequence[Sampled]]) -> Load:
        """A load has ended, with these batches."""
        computed_s = self._time.passed_s()
        now = await self._so_far()
        return Load(
            batches=batches,
            num_steps=now.num_steps - self._before.num_steps,
            computed_s=computed_s,
            wanted_s=(now.busy_s - self._before.busy_s) * self._engine_cores,
        )

    async def _so_far(self) -> _Counted:
        stats = [await one.actor.stats.call_one() for one in self._pool.replicas]
        return _Counted(
            busy_s=sum(one.busy_s for one in stats), num_steps=sum(one.num_decoding_steps for one in stats)
        )
