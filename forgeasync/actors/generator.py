"""The generator actor: a thin shell around one sampling engine.

Produces rollouts for the collecting loop; consumes weight versions from the store. ``generate`` calls overlap
freely, also with ``update_weights``: running sequences go on under the new weights.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from monarch.actor import Actor, concurrent_endpoint, current_rank

from forgeasync.config.schema import GeneratorSection, SamplingSection
from forgeasync.data.rollout import Rollout
from forgeasync.observability.logs import redirect_process_output
from forgeasync.sampler.stats import EngineStats
from forgeasync.weights import store

if TYPE_CHECKING:
    from forgeasync.sampler.engine import SamplerEngine


class GeneratorActor(Actor):
    """One engine in one proc."""

    def __init__(self, log_dir: Path) -> None:
        redirect_process_output(log_dir / f"generator-{current_rank().rank}.log")
        self._engine: SamplerEngine | None = None

    @concurrent_endpoint
    async def setup(
        self, model_path: Path, generator: GeneratorSection, max_context_length: int, seed: int
    ) -> int:
        """Load the model as policy version 0; returns the proc's id."""
        # vLLM takes 10 s to import: only the procs that sample pay for it.
        from forgeasync.sampler.engine import SamplerEngine

        self._engine = await SamplerEngine.start(
            model_path=model_path,
            generator=generator,
            max_context_length=max_context_length,
            seed=seed + current_rank().rank,
        )
        return os.getpid()

    @concurrent_endpoint
    async def generate(
        self, prompt_ids_P: np.ndarray, num_samples: int, sampling: SamplingSection, seed: int | None
    ) -> tuple[Rollout, ...]:
        """Sample a group of responses to one prompt."""
        assert self._engine is not None
        return await self._engine.generate(
            prompt_ids_P=prompt_ids_P, num_samples=num_samples, sampling=sampling, seed=seed
        )

    @concurrent_endpoint
    async def update_weights(self, version: int) -> float:
        """Fetch a published version and swap it in; returns the seconds for which decoding stood still."""
        assert self._engine is not None
        return await self._engine.update_weights(version, await store.fetch(version))

    @concurrent_endpoint
    async def parameters(self) -> list[dict[str, torch.Tensor]]:
        """Copies of every worker's parameters, to compare with the trainer's (CPU engines only)."""
        assert self._engine is not None
        return await self._engine.parameters()

    @concurrent_endpoint
    async def stats(self) -> EngineStats:
        assert self._engine is not None
        return self._engine.stats()

    @concurrent_endpoint
    async def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
