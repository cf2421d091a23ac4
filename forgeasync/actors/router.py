"""Spreads requests over generators: each goes to the one with the fewest rollouts in flight."""

import asyncio

import numpy as np

from forgeasync.actors.generator import GeneratorActor
from forgeasync.config.schema import SamplingSection, TimeoutSection
from forgeasync.data.rollout import Rollout
from forgeasync.sampler.stats import EngineStats


class GeneratorRouter:
    """The generator mesh as one generator."""

    def __init__(self, generators: GeneratorActor, num_replicas: int, timeouts: TimeoutSection) -> None:
        self._replicas = [generators.slice(procs=rank) for rank in range(num_replicas)]
        self._num_in_flight = [0] * num_replicas
        self._timeouts = timeouts

    async def generate(
        self,
        prompt_ids_P: np.ndarray,
        *,
        num_samples: int,
        sampling: SamplingSection,
        seed: int | None = None,
    ) -> tuple[Rollout, ...]:
        """Sample a group of responses to one prompt.

        Raises:
            TimeoutError: no answer within ``timeouts.generate_s``.
        """
        rank = min(range(len(self._replicas)), key=self._num_in_flight.__getitem__)
        self._num_in_flight[rank] += num_samples
        try:
            async with asyncio.timeout(self._timeouts.generate_s):
                return await self._replicas[rank].generate.call_one(prompt_ids_P, num_samples, sampling, seed)
        finally:
            self._num_in_flight[rank] -= num_samples

    async def update_weights(self, version: int) -> list[float]:
        """Every generator fetches and swaps in a version; the seconds for which each stood still."""
        async with asyncio.timeout(self._timeouts.weights_s):
            return list(
                await asyncio.gather(
                    *(replica.update_weights.call_one(version) for replica in self._replicas)
                )
            )

    async def stats(self) -> list[EngineStats]:
        """Counters of every engine since it started."""
        async with asyncio.timeout(self._timeouts.generate_s):
            return list(await asyncio.gather(*(replica.stats.call_one() for replica in self._replicas)))

    async def shutdown(self) -> None:
        """Stop every engine."""
        async with asyncio.timeout(self._timeouts.weights_s):
            await asyncio.gather(*(replica.shutdown.call_one() for replica in self._replicas))
