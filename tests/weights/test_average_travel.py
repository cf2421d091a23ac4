"""The trainer's average of its weights and the policy's, on their way into engines. Real processes."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from forgeasync.config import RunConfig
from forgeasync.models import read_model_facts
from forgeasync.runtime import GeneratorRouter, TrainerMesh, make_folders
from forgeasync.testing import tiny_config, write_tiny_model
from forgeasync.weights import WeightSet
from tests.support.engines import assert_engine_holds
from tests.support.trainer_and_generators import both_running
from tests.support.trainers import random_rows

ALPHA, NUM_STEPS = 0.75, 3


async def _connect(
    config: RunConfig, trainer: TrainerMesh, router: GeneratorRouter, weights: WeightSet
) -> None:
    """Have the one engine take one set of weights, as a teacher's engine or a generator does."""
    layout = await trainer.lay_out_weights(config.generator.dtype)
    host = router.pool.hosts[0]
    staging = await make_folders([host] * trainer.num_procs, [rank.num_bytes for rank in layout.ranks])
    choice = config.weights.transport
    sources = await trainer.open_staging(staging, choice, generator_hosts=frozenset({host.id}))
    (folder,) = await make_folders([host], [layout.of(weights).num_bytes])
    await router.connect_weights(layout.of(weights), sources, [folder])


async def _update(trainer: TrainerMesh, router: GeneratorRouter, slot: int) -> int:
    manifest = await trainer.stage_weights(slot)
    fetched = await router.begin_update(0, manifest)
    assert fetched is not None and fetched.is_complete, fetched
    await router.finish_update(0, manifest.version)
    return fetched.num_bytes_moved


@pytest.mark.exhaustive
@pytest.mark.processes
async def test_each_reader_gets_its_set_of_weights(tmp_path: Path) -> None:
    """From two ranks with half of the experts each; averages are those of the exported steps, bit for bit."""
    folder = write_tiny_model(tmp_path / "hf", scale=3.0)
    config, vocab_size = tiny_config(folder), read_model_facts(str(folder)).vocab_size
    average, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    num_bytes = sum(tensor.nbytes for tensor in average.values())
    running = both_running(config, folder, tmp_path / "logs", average_alpha=ALPHA)
    async with running as (_, trainer, router):
        for step in range(1, NUM_STEPS + 1):
            await trainer.train_rows(random_rows(rng, vocab_size, trainer.num_data_ranks), step=step)
            await trainer.save_hf(tmp_path / f"step-{step}", source=folder)
            policy = load_file(tmp_path / f"step-{step}" / "model-00001-of-00001.safetensors")
            for name, tensor in average.items():
                tensor.mul_(ALPHA).add_(policy[name], alpha=1.0 - ALPHA)
        for weights, expected in ((WeightSet.AVERAGE, average), (WeightSet.POLICY, policy)):
            await _connect(config, trainer, router, weights)
            num_bytes_moved = await _update(trainer, router, 0)
            assert num_bytes <= num_bytes_moved < 2 * num_bytes, "whole blocks are fetched"
            assert_engine_holds(await router.pool.replicas[0].actor.parameters.call_one(), expected)
