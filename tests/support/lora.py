"""A trainer with adapters, and what there is to see of it."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from forgeasync.algorithms import Loss
from forgeasync.config import (
    ADAPTABLE,
    ActivationCheckpointing,
    Dtype,
    LoraSection,
    OptimizerSection,
    ParallelSection,
    TrainerSection,
)
from forgeasync.models import read_model_facts
from forgeasync.trainer import (
    PolicyTrainer,
    TrainerSetup,
    TrainingSequence,
    adapter_parameters,
    copy_whole,
    is_adapter,
)

TOKENS_PER_ROW = 128
PREFIX = "base_model.model."

# A rank that grouped matrix products do not take as it is.
LORA = LoraSection(rank=3, alpha=6.0, targets=ADAPTABLE)


def make_trainer(
    folder: Path,
    parallel: ParallelSection,
    *,
    lora: LoraSection = LORA,
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE,
    compile: bool = False,
    dtype: Dtype = Dtype.FLOAT32,
    is_fresh: bool = False,
    average_alpha: float | None = None,
) -> PolicyTrainer:
    """A trainer with adapters; unless ``is_fresh``, their B is not zero."""
    section = TrainerSection(
        parallel=parallel,
        tokens_per_row=TOKENS_PER_ROW,
        activation_checkpointing=checkpointing,
        compile=compile,
        dtype=dtype,
        # A large step, so that a wrong gradient shows in the weights.
        optimizer=OptimizerSection(learning_rate=1e-2, max_grad_norm=0.1, eps=1e-3),
    )
    setup = TrainerSetup(
        section=section,
        facts=read_model_facts(str(folder)),
        temperature=1.0,
        loss=Loss(),
        seed=0,
        checkpoint=folder,
        lora=lora,
        average_alpha=average_alpha,
    )
    trainer = PolicyTrainer(setup)
    if is_fresh:
        return trainer
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapter_parameters(trainer.model):
        if "lora_b" in name:
            copy_whole(parameter, 0.1 * torch.randn(parameter.shape, generator=generator))
    return trainer


def adapters(trainer: PolicyTrainer, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """All adapters (or their gradients) whole, one tensor per expert."""
    tensors = {}
    for weight in trainer.named_weights():
        tensor = weight.tensor.grad if gradients else weight.tensor.detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        tensors |= dict(zip(weight.names, full if len(weight.names) > 1 else [full], strict=True))
    return {name: tensor.clone() for name, tensor in tensors.items()}


def base_weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """This rank's shards of everything that is no adapter."""
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in trainer.model.named_parameters()
        if not is_adapter(name)
    }


def free(sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    """Three of the sequences, routed by the model itself, over the whole vocabulary."""
    return [dataclasses.replace(s, expert_ids_SMK=None, kept_tokens=None) for s in sequences[:3]]


def reference_logprobs(model: torch.nn.Module, sequence: TrainingSequence) -> torch.Tensor:
    """Of a sequence's response, by a transformers (or peft) model."""
    ids = torch.from_numpy(np.concatenate([sequence.prompt_ids_P, sequence.response_ids_T])).long()
    logits = model(ids[None]).logits[0, len(sequence.prompt_ids_P) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, ids[len(sequence.prompt_ids_P) :, None])[:, 0]
