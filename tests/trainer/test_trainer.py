"""A trainer: what it reads of a checkpoint, what its layers share, and that probing changes nothing."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchtitan.models.common.rope import RoPE

from forgeasync.config import ModelFacts, OptimizerSection, ParallelSection, TrainerSection
from forgeasync.models import expected_shapes
from forgeasync.testing import write_tiny_model
from forgeasync.trainer import (
    TrainingSequence,
    build_parallel_dims,
    build_parallel_model,
    checkpoint_weights,
    hf_checkpoint,
    pack_rows,
    share_rotary_caches,
    titan_config,
)
from tests.support.config_samples import FACTS
from tests.support.live_tensors import LiveTensors
from tests.support.processes import run_ranks
from tests.support.trainers import TOKENS_PER_ROW, local, make_trainer, named_tensors

WIDE = dataclasses.replace(FACTS, hidden_size=128, expert_hidden_size=128, num_experts=32, vocab_size=2000)

LAYOUTS = (
    ParallelSection(num_procs=2),
    ParallelSection(num_procs=2, tensor=2, expert=2),
    ParallelSection(num_procs=2, tensor=2, sequence=False),
)


def _load(folder: Path, facts: ModelFacts, parallel: ParallelSection) -> None:
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
    for name, tensor in hf_checkpoint.full_tensors(model, facts):
        assert (tensor == numbers[name]).all(), name
    # Not even a part of a tensor is held besides the shards, least of all a layer's experts together.
    model_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    assert live.peak_bytes <= max(shard.nbytes for shard in shards) / 16 < model_bytes / 64


def _load_all(folder: Path, facts: ModelFacts) -> None:
    for parallel in LAYOUTS:
        _load(folder, facts, parallel)


def test_loading_allocates_next_to_nothing(tmp_path: Path) -> None:
    shapes = expected_shapes(WIDE)
    tensors = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(shapes.items())}
    save_file(tensors, tmp_path / "model.safetensors")
    with LiveTensors([]) as live:
        torch.stack([torch.ones(1000), torch.ones(1000)])
    assert live.peak_bytes == 16_000 and live.num_bytes == 0
    run_ranks(2, _load_all, tmp_path, WIDE)


def test_layers_share_one_cache() -> None:
    """Long contexts make it large."""
    model = titan_config(FACTS).build()
    ropes = [module for module in model.modules() if isinstance(module, RoPE)]
    before = [rope.cache for rope in ropes]
    assert len(ropes) == FACTS.num_layers and len({cache.data_ptr() for cache in before}) == len(ropes)
    share_rotary_caches(model)
    assert len({rope.cache.data_ptr() for rope in ropes}) == 1
    assert all(torch.equal(rope.cache, cache) for rope, cache in zip(ropes, before, strict=True))


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"moe_intermediate_size": 64', '"moe_intermediate_size": 32')
    )
    with pytest.raises(Exception, match=r"experts.0.gate_proj.*shape \(64, 64\).*\(32, 64\)"):
        run_ranks(1, make_trainer, folder)


def _probed_steps(
    folder: Path, sequences: list[TrainingSequence], probe_share: float
) -> tuple[list[float], dict[str, torch.Tensor], list[tuple[int, ...]]]:
    """Gradient norms of three steps, the weights after them, and the shapes of what is published."""
    parallel = ParallelSection(num_procs=2, expert=2)
    trainer = make_trainer(folder, parallel, replay_probe_share=probe_share)
    rows = pack_rows(sequences, tokens_per_row=TOKENS_PER_ROW, num_ranks=trainer.num_data_ranks)
    norms = [trainer.train_step(rows[trainer.data_rank]).metrics["grad_norm"] for _ in range(3)]
    shapes = [tuple(local(weight.tensor).shape) for weight in trainer.named_weights()]
    return norms, named_tensors(trainer), shapes


def test_probing_changes_nothing(folder: Path, sequences: list[TrainingSequence]) -> None:
    plain, probed = (run_ranks(2, _probed_steps, folder, sequences, share) for share in (0.0, 1.0))
    for one, other in zip(plain, probed, strict=True):
        assert other[0] == one[0]
        assert all(torch.equal(other[1][name], tensor) for name, tensor in one[1].items())
        assert other[2] == one[2], "whole parameters are left where shards belong"
