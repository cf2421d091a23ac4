"""A trainer with adapters, and what there is to see of it."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from forgeasync.config import ADAPTABLE, LoraSection, ParallelSection
from forgeasync.trainer import PolicyTrainer, TrainingSequence, adapter_parameters, copy_whole
from tests.support import trainers

PREFIX = "base_model.model."

# A rank that grouped matrix products do not take as it is.
LORA = LoraSection(rank=3, alpha=6.0, targets=ADAPTABLE)


def make_trainer(
    folder: Path,
    parallel: ParallelSection | None = None,
    *,
    lora: LoraSection = LORA,
    is_fresh: bool = False,
    **options: Any,
) -> PolicyTrainer:
    """A trainer with adapters; unless ``is_fresh``, their B is not zero."""
    trainer = trainers.make_trainer(folder, parallel, lora=lora, **options)
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in adapter_parameters(trainer.model)}, "all else is frozen"
    if is_fresh:
        return trainer
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapter_parameters(trainer.model):
        if "lora_b" in name:
            copy_whole(parameter, 0.1 * torch.randn(parameter.shape, generator=generator))
    return trainer


def base_weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """This rank's shards of what is frozen beneath adapters."""
    return {
        name: trainers.local(p).detach().clone()
        for name, p in trainer.model.named_parameters()
        if not p.requires_grad
    }


def free(sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    """Three of the sequences, routed by the model itself, over the whole vocabulary."""
    return [dataclasses.replace(s, expert_ids_SMK=None, kept_tokens=None) for s in sequences[:3]]
