"""The trainer's average of its weights and the policy's, on their way into engines. Real processes."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forgeasync.config import RunConfig
from forgeasync.models import read_model_facts
from forgeasync.runtime import GeneratorRouter, LocalHosts, ProcessManager, TrainerMesh, make_folders
from forgeasync.testing import tiny_config, write_tiny_model
from forgeasync.weights import WeightSet
from tests.support.engines import assert_engine_holds
from tests.support.trainer_and_generators import start_both
from tests.support.trainers import random_rows

ALPHA, NUM_STEPS = 0.75, 3

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Seen:
    exported: list[Tensors]
    """The policy after each step."""
    of_policy: list[Tensors]
    of_average: list[Tensors]
    """Parameters of the engine's workers under each set of the last version."""
    num_bytes_moved: list[int]


async def _connect(
    processes: ProcessManager,
    config: RunConfig,
    trainer: TrainerMesh,
    router: GeneratorRouter,
    weights: WeightSet,
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


async def _scenario(config: RunConfig, folder: Path, out: Path) -> Seen:
    vocab_size = read_model_facts(str(folder)).vocab_size
    rng = np.random.default_rng(0)
    processes = ProcessManager(out / "logs", LocalHosts())
    try:
        trainer, router = await start_both(processes, config, folder, average_alpha=ALPHA)
        exported = []
        for step in range(1, NUM_STEPS + 1):
            await trainer.train_rows(random_rows(rng, vocab_size, trainer.num_data_ranks), step=step)
            await trainer.save_hf(out / f"step-{step}", source=folder)
            exported.append(load_file(out / f"step-{step}" / "model-00001-of-00001.safetensors"))
        engine, seen = router.pool.replicas[0].actor, []
        moved = []
        for weights in (WeightSet.AVERAGE, WeightSet.POLICY):
            await _connect(processes, config, trainer, router, weights)
            moved.append(await _update(trainer, router, 0))
            seen.append(await engine.parameters.call_one())
        return Seen(exported=exported, of_average=seen[0], of_policy=seen[1], num_bytes_moved=moved)
    finally:
        await processes.close()


@pytest.mark.exhaustive
@pytest.mark.processes
def test_each_reader_gets_its_set_of_weights(tmp_path: Path) -> None:
    """From two ranks with half of the experts each; averages are those of the exported steps, bit for bit."""
    folder = write_tiny_model(tmp_path / "hf", scale=3.0)
    config = tiny_config(folder)
    seen = asyncio.run(_scenario(config, folder, tmp_path))
    average = load_file(folder / "model.safetensors")
    for exported in seen.exported:
        for name, tensor in average.items():
            tensor.mul_(ALPHA).add_(exported[name], alpha=1.0 - ALPHA)
    assert_engine_holds(seen.of_average, average)
    assert_engine_holds(seen.of_policy, seen.exported[-1])
    num_bytes = sum(tensor.nbytes for tensor in average.values())
    # Whole blocks are fetched.
    assert all(num_bytes <= one < 2 * num_bytes for one in seen.num_bytes_moved)
