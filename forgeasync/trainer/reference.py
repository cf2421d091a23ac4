"""The policy that a run starts from, for the penalty on moving away from it.

With adapters it is the trained model with its adapters switched off. Otherwise it is a second model, frozen,
in the compute dtype, sharded like the trained one; its gathered weights are freed after every row.

It sees a row as the trained policy does (kept sets, temperature) but for routing: its own gate chooses.

Shape suffix: T targets of a row.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torchtitan.distributed import ParallelDims

from forgeasync.config import ModelFacts, TrainerSection
from forgeasync.trainer import hf_checkpoint
from forgeasync.trainer.forward import RowForward
from forgeasync.trainer.lora import without_adapters
from forgeasync.trainer.model import build_parallel_model
from forgeasync.trainer.packing import PackedRow

ReferenceLogprobs = Callable[[PackedRow], torch.Tensor]
"""A row's log-probabilities under the reference, float32 [T], without gradients; collective."""


def frozen_copy(
    facts: ModelFacts,
    section: TrainerSection,
    *,
    parallel_dims: ParallelDims,
    temperature: float,
    checkpoint: Path,
) -> ReferenceLogprobs:
    """A model of its own, read from a Hugging Face folder."""
    model = build_parallel_model(facts, section, parallel_dims=parallel_dims, is_frozen=True)
    hf_checkpoint.load(model, facts, checkpoint)
    forward = RowForward(model, parallel_dims=parallel_dims, section=section, temperature=temperature)

    return lambda row: _unrecorded(forward, row)


def base_model(model: torch.nn.Module, forward: RowForward) -> ReferenceLogprobs:
    """The trained model itself, without its adapters."""

    def logprobs(row: PackedRow) -> torch.Tensor:
        with without_adapters(model):
            return _unrecorded(forward, row)

    return logprobs


@torch.no_grad()
def _unrecorded(forward: RowForward, row: PackedRow) -> torch.Tensor:
    unrecorded = dataclasses.replace(row, expert_ids_LMK=None)
    with forward.replay(unrecorded):
        return forward.logprobs(unrecorded)
