"""Adapters on their way from the trainer mesh into a running engine: only they travel, merged on arrival."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forgeasync.config import LoraSection, RunConfig, SamplingSection
from forgeasync.runtime import (
    CancelledGroup,
    GeneratorRouter,
    ProcessManager,
    RefusedGroup,
    TrainerMesh,
    connect_weights,
)
from forgeasync.testing import tiny_config, write_tiny_model
from forgeasync.trainer import assign_rows, items_of, whole_response
from forgeasync.weights import FetchReport
from tests.support.engines import assert_engine_holds
from tests.support.trainer_and_generators import start_both

NUM_UPDATES = 3
SERVED = "attention"
"""By vLLM itself, beside base weights that never change."""
TARGETS = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    # Each shares a parameter of the engine with a layer that stays as it is.
    "one_of_a_fused_parameter": ("v_proj", "up_proj"),
    SERVED: ("q_proj", "v_proj", "o_proj"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    parameters: list[dict[str, torch.Tensor]]
    fetches: list[FetchReport]
    mismatches: list[float]
    """Largest difference of log-probabilities on fresh data, after every number of updates."""


async def _train_on_fresh(trainer: TrainerMesh, generators: GeneratorRouter) -> float:
    answer = await generators.sample_group(
        0, np.arange(3, 9, dtype=np.int32), num_samples=6, sampling=SamplingSection(max_response_tokens=24)
    )
    assert not isinstance(answer, RefusedGroup | CancelledGroup), answer
    items = [
        item
        for i, r in enumerate(answer)
        for item in items_of(r, whole_response(1.0 if i % 2 else -1.0), weight=1.0)
    ]
    rows = assign_rows(items, tokens_per_row=256, num_ranks=trainer.num_data_ranks)
    result = await trainer.train_items([rows], step=1)
    await generators.free_payloads(answer)
    return result.metrics["mismatch/logprob_abs_max"]


async def _scenario(config: RunConfig, folder: Path, out: Path) -> Seen:
    manager = ProcessManager(out / "logs")
    try:
        trainer, generators = await start_both(manager, config, folder)
        await trainer.connect(generators)
        await connect_weights(manager, config, trainer, generators)
        mismatches = [await _train_on_fresh(trainer, generators)]
        fetches = []
        for update in range(NUM_UPDATES):
            fetches.append(await generators.begin_update(0, await trainer.stage_weights(update % 2)))
            await generators.finish_update(0, fetches[-1].version)
            if update < NUM_UPDATES - 1:
                mismatches.append(await _train_on_fresh(trainer, generators))
        await trainer.save_hf(out / "adapter", source=folder)
        (replica,) = (one.actor for one in generators.pool.replicas)
        return Seen(parameters=await replica.parameters.call_one(), fetches=fetches, mismatches=mismatches)
    finally:
        await manager.close()


def merge_by_hand(folder: Path, adapter: Path, lora: LoraSection) -> tuple[dict[str, torch.Tensor], int]:
    """The base folder's tensors plus (alpha / rank) B A; and how many have changed."""
    tensors = load_file(folder / "model.safetensors")
    sides = _adapter_tensors(adapter)
    num_changed = 0
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module in sides:
            a, b = sides[module]
            tensors[name] = (tensor.double() + lora.alpha / lora.rank * b.double() @ a.double()).float()
            num_changed += int(not torch.equal(tensors[name], tensor))
    return tensors, num_changed


def _adapter_tensors(adapter: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(A, B) of every adapted layer, each expert's by itself."""
    stored = load_file(adapter / "adapter_model.safetensors")
    prefix, end = "base_model.model.", ".lora_A.weight"
    return {
        name.removeprefix(prefix).removesuffix(end): (a, stored[name.replace("lora_A", "lora_B")])
        for name, a in stored.items()
        if name.endswith(end)
    }


@pytest.mark.exhaustive
@pytest.mark.procs
@pytest.mark.parametrize("name", TARGETS)
def test_the_engine_samples_under_the_merged_adapters(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", scale=3.0)
    lora = LoraSection(rank=4, alpha=8.0, targets=TARGETS[name])
    base = tiny_config(folder)
    optimizer = base.trainer.optimizer.model_copy(update={"learning_rate": 0.02})
    trainer = base.trainer.model_copy(update={"optimizer": optimizer})
    config = base.model_copy(update={"lora": lora, "trainer": trainer})
    seen = asyncio.run(_scenario(config, folder, tmp_path))
    assert max(seen.mismatches) < 1e-4, "fresh data: the engine computes with what the trainer trains"

    expected, num_changed = merge_by_hand(folder, tmp_path / "adapter", lora)
    # Two layers with four experts; four attention layers and three of every expert.
    assert num_changed == sum(2 if target[0] in "qkvo" else 8 for target in TARGETS[name])
    if name != SERVED:
        assert_engine_holds(seen.parameters, expected, atol=1e-6)

    full_bytes = sum(tensor.nbytes for tensor in expected.values())
    assert all(fetch.is_complete for fetch in seen.fetches)
    assert max(fetch.num_bytes_moved for fetch in seen.fetches) < full_bytes / 2
