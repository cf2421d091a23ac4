"""Optimizer, learning rate schedule, and moving average of the weights."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from forgeasync.config import ModelFacts, OptimizerSection
from forgeasync.trainer.hf_checkpoint import hf_names, published_tensors
from forgeasync.weights import NamedWeight, WeightSet, local_shard, name_in


def scheduled_learning_rate(optimizer: OptimizerSection, step: int) -> float:
    """Return the learning rate of a batch: linear warmup, then constant, then linear decay to 0.

    Args:
        optimizer: The config's ``trainer.optimizer`` section.
        step: Number of the batch, counted from 1.
    """
    factor = min(1.0, step / max(1, optimizer.warmup_steps))
    if optimizer.decay_steps is not None:
        start, end = optimizer.decay_steps
        factor *= min(1.0, max(0.0, (end - step) / (end - start)))
    return optimizer.learning_rate * factor


def set_learning_rate(optimizer: torch.optim.AdamW, section: OptimizerSection, step: int) -> float:
    """Set and return the learning rate of a batch, counted from 1."""
    learning_rate = scheduled_learning_rate(section, step)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    return learning_rate


def build_optimizer(
    trained: Sequence[tuple[str, torch.nn.Parameter]], optimizer: OptimizerSection
) -> torch.optim.AdamW:
    """Return AdamW over these parameters, given by name.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2.
    """
    # AdamW's fused loops cannot mix device meshes: experts (sharded over the expert mesh) and the rest
    # (sharded over the data mesh) are separate groups.
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


AVERAGE = "average."
"""Prefix of the names of averages in a checkpoint."""


class WeightAverage:
    """Exponential moving average of each trained parameter, in float32, sharded like the parameter.

    Teachers that follow the policy slowly use it. After a step: average <- alpha * average + (1 - alpha) *
    parameter (Polyak & Juditsky, 1992; as the mean teacher of Tarvainen & Valpola, 2017). It starts as the
    initial weights, without bias correction.
    """

    def __init__(
        self, model: torch.nn.Module, facts: ModelFacts, alpha: float | None, *, has_adapters: bool
    ) -> None:
        """Start with the current parameters; if ``alpha`` is None, nothing is averaged."""
        self._model, self._facts, self._has_adapters = model, facts, has_adapters
        self._alpha = 0.0 if alpha is None else alpha
        self._parameters: dict[str, torch.nn.Parameter] = {}
        if alpha is not None:
            self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._averages = {
            name: parameter.detach().to(torch.float32, copy=True)
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update the averages after an optimizer step; every rank updates its own shards."""
        for name, parameter in self._parameters.items():
            average, newest = local_shard(self._averages[name]), local_shard(parameter.detach())
            average.mul_(self._alpha).add_(newest.float(), alpha=1.0 - self._alpha)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averages by their names in a checkpoint; they share this object's memory."""
        return {f"{AVERAGE}{name}": tensor for name, tensor in self._averages.items()}

    def named_weights(self) -> list[NamedWeight]:
        """Return this rank's shards of the averages, under the names of ``WeightSet.AVERAGE``.

        Tensors that are published but not trained, such as biases of routers, have their current values.
        """
        if not self._averages:
            return []
        return [
            NamedWeight(
                names=tuple(name_in(WeightSet.AVERAGE, one) for one in hf_names(name, self._facts)),
                tensor=self._averages.get(name, tensor),
            )
            for name, tensor in published_tensors(self._model, has_adapters=self._has_adapters)
        ]
