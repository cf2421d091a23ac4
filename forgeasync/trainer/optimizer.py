"""The optimizer and its learning rate."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from forgeasync.config import OptimizerSection


def scheduled_learning_rate(optimizer: OptimizerSection, step: int) -> float:
    """The learning rate of a batch, counted from 1: linear warm-up, constant, linear decay to zero."""
    factor = min(1.0, step / max(1, optimizer.warmup_steps))
    if optimizer.decay_steps is not None:
        start, end = optimizer.decay_steps
        factor *= min(1.0, max(0.0, (end - step) / (end - start)))
    return optimizer.learning_rate * factor


def set_learning_rate(optimizer: torch.optim.AdamW, section: OptimizerSection, step: int) -> float:
    """Give the optimizer the learning rate of a batch, counted from 1; returns it."""
    learning_rate = scheduled_learning_rate(section, step)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    return learning_rate


def build_optimizer(
    trained: Sequence[tuple[str, torch.nn.Parameter]], optimizer: OptimizerSection
) -> torch.optim.AdamW:
    """AdamW over these parameters, by name."""
    # AdamW's fused loops cannot mix device meshes: experts (sharded over the expert mesh) and the rest
    # (sharded over the data mesh) are groups of their own.
    by_mesh: dict[object, list[torch.nn.Parameter]] = {}
    for _, parameter in trained:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": parameters} for parameters in by_mesh.values()],
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        fused=True,
    )
