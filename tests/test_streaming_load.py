"""A rank reads its own shards of a checkpoint and nothing else."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from forgeasync.config.checkpoint_shapes import expected_shapes
from forgeasync.config.model_facts import ModelFacts
from forgeasync.config.schema import OptimizerSection, ParallelSection, TrainerSection
from forgeasync.trainer import hf_checkpoint
from forgeasync.trainer.model import build_parallel_dims, build_parallel_model
from forgeasync.trainer.router_bias import checkpoint_weights
from tests.config_samples import FACTS
from tests.support.live_tensors import LiveTensors
from tests.support.processes import run_ranks

WIDE = dataclasses.replace(
    FACTS,
    hidden_size=128,
    expert_hidden_size=128,
    num_experts=32,
    vocab_size=2000,
    max_position_embeddings=64,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    peak_bytes: int
    model_bytes: int
    largest_shard_bytes: int
    is_right: bool


def _load(folder: Path, facts: ModelFacts, parallel: ParallelSection) -> Loaded:
    section = TrainerSection(
        parallel=parallel, tokens_per_row=64, optimizer=OptimizerSection(learning_rate=1e-3)
    )
    dims = build_parallel_dims(section, world_size=parallel.num_procs)
    model = build_parallel_model(facts, section, parallel_dims=dims)
    weights = [weight for _, weight in checkpoint_weights(model)]
    shards = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    with LiveTensors(weights) as live:
        hf_checkpoint.load(model, facts, folder)
    # Every tensor is filled with its number: the right ones are in the right places.
    numbers = {name: float(index) for index, name in enumerate(expected_shapes(facts))}
    is_right = all(bool((t == numbers[name]).all()) for name, t in hf_checkpoint.full_tensors(model, facts))
    return Loaded(
        peak_bytes=live.peak_bytes,
        model_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
        largest_shard_bytes=max(shard.nbytes for shard in shards),
        is_right=is_right,
    )


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelSection(num_procs=2),
        ParallelSection(num_procs=2, tensor=2, expert=2),
        ParallelSection(num_procs=2, tensor=2, sequence=False),
    ],
    ids=["fsdp2", "tp2-ep2", "tp2"],
)
def test_loading_takes_no_more_than_one_shard_of_one_tensor(
    tmp_path: Path, parallel: ParallelSection
) -> None:
    shapes = expected_shapes(WIDE)
    tensors = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(shapes.items())}
    save_file(tensors, tmp_path / "model.safetensors")
    largest = max(tensor.nbytes for tensor in tensors.values())
    for loaded in run_ranks(2, _load, tmp_path, WIDE, parallel):
        assert loaded.is_right
        assert 0 < loaded.peak_bytes <= largest / 2
        # A layer's experts are one parameter, but are read one by one.
        assert loaded.peak_bytes <= loaded.largest_shard_bytes < loaded.model_bytes / 4
