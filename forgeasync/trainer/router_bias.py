"""The bias that corrects a router's choice (DeepSeek-V3), as a weight, and its update.

Loss-free load balancing: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
2024, algorithm 1, with TorchTitan's refinement that the mean of a step's changes is taken off. No gradient
reaches a bias: scores are not computed with it.

Shape suffixes: E experts, M MoE layers.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import MoE

from forgeasync.trainer.replay_router import ReplayRouter

_BUFFER = "expert_bias_E"


def router_biases(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The biases of all layers that have one, by TorchTitan's names; in the order of the layers."""
    return ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(f".{_BUFFER}"))


def checkpoint_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a checkpoint of the model holds: parameters, and biases of routers."""
    yield from model.named_parameters()
    yield from router_biases(model)


class RouterBiasUpdate:
    """Counts the tokens that experts get in a step, and moves biases against the difference."""

    def __init__(self, model: nn.Module, speed: float) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, MoE)]
        self._speed = speed
        num_experts = self._layers[0].router.num_experts
        device = self._layers[0].tokens_per_expert_E.device
        self._counts_ME = torch.zeros((len(self._layers), num_experts), dtype=torch.float64, device=device)

    def add(self, routers: Sequence[ReplayRouter]) -> None:
        """Add the tokens of the last forward pass."""
        self._counts_ME += torch.stack([router.expert_counts_E for router in routers])

    @torch.no_grad()
    def step(self) -> None:
        """Move all biases by ``speed``, up where fewer tokens came than on average; collective."""
        # Ranks that go through the same tokens count them as often for every expert: only signs matter.
        dist.all_reduce(self._counts_ME)
        missing_ME = self._counts_ME.mean(-1, keepdim=True) - self._counts_ME
        change_ME = self._speed * torch.sign(missing_ME)
        change_ME -= change_ME.mean(-1, keepdim=True)
        for moe, change_E in zip(self._layers, change_ME, strict=True):
            bias_E = moe.expert_bias_E
            own_E = bias_E.to_local() if isinstance(bias_E, DTensor) else bias_E
            own_E += change_E.to(own_E.dtype)
        self.discard()

    def discard(self) -> None:
        """Forget the tokens counted so far."""
        self._counts_ME.zero_()
