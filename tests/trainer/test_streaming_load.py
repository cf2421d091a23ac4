"""A rank reads its own shards of a checkpoint and nothing else, and its layers share one rotary cache."""

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchtitan.models.common.rope import RoPE

from forgeasync.config import ModelFacts, OptimizerSection, ParallelSection, TrainerSection
from forgeasync.models import expected_shapes
from forgeasync.trainer import (
    build_parallel_dims,
    build_parallel_model,
    checkpoint_weights,
    hf_checkpoint,
    share_rotary_caches,
    titan_config,
)
from tests.support.config_samples import FACTS
from tests.support.live_tensors import LiveTensors
from tests.support.processes import run_ranks
from tests.support.trainers import local

WIDE = dataclasses.replace(FACTS, hidden_size=128, expert_hidden_size=128, num_experts=32, vocab_size=2000)

LAYOUTS = (
    ParallelSection(num_procs=2),
    ParallelSection(num_procs=2, tensor=2, expert=2),
    ParallelSection(num_procs=2, tensor=2, sequence=False),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    peak_bytes: int
    model_bytes: int
    largest_shard_bytes: int
    is_right: bool


def _load(folder: Path, facts: ModelFacts, parallel: ParallelSection) -> Loaded:
    optimizer = OptimizerSection(learning_rate=1e-3)
    section = TrainerSection(parallel=parallel, tokens_per_row=64, optimizer=optimizer)
    dims = build_parallel_dims(section, world_size=parallel.num_procs)
    model = build_parallel_model(facts, section, parallel_dims=dims)
    weights = [weight for _, weight in checkpoint_weights(model)]
    shards = [local(weight) for weight in weights]
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


def _load_all(folder: Path, facts: ModelFacts) -> list[Loaded]:
    return [_load(folder, facts, parallel) for parallel in LAYOUTS]


def test_loading_allocates_next_to_nothing(tmp_path: Path) -> None:
    shapes = expected_shapes(WIDE)
    tensors = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(shapes.items())}
    save_file(tensors, tmp_path / "model.safetensors")
    with LiveTensors([]) as live:
        torch.stack([torch.ones(1000), torch.ones(1000)])
    assert live.peak_bytes == 16_000 and live.num_bytes == 0
    for of_rank in run_ranks(2, _load_all, tmp_path, WIDE):
        for loaded in of_rank:
            assert loaded.is_right
            # Not even a part of a tensor is held besides the shards, least of all a layer's experts together.
            assert loaded.peak_bytes <= loaded.largest_shard_bytes / 16 < loaded.model_bytes / 64


def test_layers_share_one_cache() -> None:
    """Long contexts make it large."""
    model = titan_config(FACTS).build()
    ropes = [module for module in model.modules() if isinstance(module, RoPE)]
    before = [rope.cache for rope in ropes]
    assert len(ropes) == FACTS.num_layers and len({cache.data_ptr() for cache in before}) == len(ropes)
    share_rotary_caches(model)
    assert len({rope.cache.data_ptr() for rope in ropes}) == 1
    assert all(torch.equal(rope.cache, cache) for rope, cache in zip(ropes, before, strict=True))
