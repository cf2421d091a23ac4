"""An average of what is trained, over the optimizer's steps, for teachers that follow the policy slowly."""

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from forgeasync.config import ModelFacts
from forgeasync.trainer.hf_checkpoint import hf_names
from forgeasync.trainer.lora import adapter_parameters
from forgeasync.trainer.replay_router import checkpoint_weights
from forgeasync.trainer.run_checkpoint import State
from forgeasync.weights import NamedWeight, WeightSet, name_in

AVERAGE = "average."
"""Beginning of the names of averages in a checkpoint."""


def named_weights(model: torch.nn.Module, facts: ModelFacts, *, has_adapters: bool) -> list[NamedWeight]:
    """This rank's shards of a policy's weights, by Hugging Face (peft) names; without a tied head."""
    return [
        NamedWeight(names=tuple(hf_names(name, facts)), tensor=tensor)
        for name, tensor in _published(model, has_adapters=has_adapters)
    ]


class WeightAverage:
    """The exponential moving average of each trained parameter, in float32, sharded as the parameter is.

    After a step: average <- alpha * average + (1 - alpha) * parameter (Polyak & Juditsky, 1992; as the mean
    teacher of Tarvainen & Valpola, 2017). It begins as the first weights, without a correction of its bias.
    """

    def __init__(
        self, model: torch.nn.Module, facts: ModelFacts, alpha: float | None, *, has_adapters: bool
    ) -> None:
        """Begin with the parameters as they are; without ``alpha`` nothing is averaged."""
        self._model, self._facts, self._has_adapters = model, facts, has_adapters
        self._alpha = alpha
        self._parameters: dict[str, torch.nn.Parameter] = {}
        if alpha is not None:
            self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._averages = {
            name: parameter.detach().to(torch.float32, copy=True)
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        """Take in the parameters after an optimizer step; every rank its own shards."""
        for name, parameter in self._parameters.items():
            assert self._alpha is not None, "something is averaged"
            average, newest = _local(self._averages[name]), _local(parameter.detach())
            average.mul_(self._alpha).add_(newest.float(), alpha=1.0 - self._alpha)

    def tensors(self) -> State:
        """The averages as tensors of a checkpoint; they share this object's memory."""
        return {f"{AVERAGE}{name}": tensor for name, tensor in self._averages.items()}

    def named_weights(self) -> list[NamedWeight]:
        """This rank's shards of the averages as they are published, under names of ``WeightSet.AVERAGE``.

        What is published without being trained, biases of routers, is as it is now.
        """
        if not self._averages:
            return []
        return [
            NamedWeight(
                names=tuple(name_in(WeightSet.AVERAGE, one) for one in hf_names(name, self._facts)),
                tensor=self._averages.get(name, tensor),
            )
            for name, tensor in _published(self._model, has_adapters=self._has_adapters)
        ]


def _published(model: torch.nn.Module, *, has_adapters: bool) -> Iterable[tuple[str, torch.Tensor]]:
    return adapter_parameters(model) if has_adapters else checkpoint_weights(model)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
