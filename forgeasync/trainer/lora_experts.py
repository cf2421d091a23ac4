"""Experts with a low-rank adapter each, computed by the same grouped products as the experts themselves.

Shape suffixes: E experts on this rank, F expert hidden size, D model dim, R tokens routed to this rank; I and
O the input and output size of one projection, r the rank of its adapter.
"""

from dataclasses import dataclass

import spmd_types as spmd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.models.common.moe_sharding import expert_param_placement_dense, expert_param_placement_sparse
from torchtitan.protocols.module import Module, ModuleDict
from torchtitan.protocols.sharding import ShardingConfig, SpmdLayout

from forgeasync.trainer.workarounds.experts import TrainingDtypeExperts, grouped_mm

_GROUPED_STRIDE_BYTES = 16
"""Rows of the operands of a grouped product start at multiples of this many bytes."""


class GroupedAdapter(Module):
    """One adapter per expert: [R, I] to B A x, [R, O], tokens sorted by expert."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        num_experts: int
        in_features: int
        out_features: int
        rank: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.lora_a_ErI = nn.Parameter(torch.empty(config.num_experts, config.rank, config.in_features))
        self.lora_b_EOr = nn.Parameter(torch.empty(config.num_experts, config.out_features, config.rank))

    def forward(self, x_RI: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        a_ErI, b_EOr = _own_part(self.lora_a_ErI), _own_part(self.lora_b_EOr)
        # Zeros up to the next rank that grouped products take add nothing.
        padding = -a_ErI.shape[1] % (_GROUPED_STRIDE_BYTES // a_ErI.element_size())
        a_ErI, b_EOr = F.pad(a_ErI, (0, 0, 0, padding)), F.pad(b_EOr, (0, padding))
        hidden_Rr = grouped_mm(x_RI, a_ErI.transpose(-2, -1), offsets_E)
        return grouped_mm(hidden_Rr, b_EOr.transpose(-2, -1), offsets_E)


def _own_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, as a plain tensor.

    With tensor parallelism inside of experts one of A and B is whole on every rank, but meets only this
    rank's part of the other: its gradient is a term of a sum over the ranks.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    gradients = [Partial() if isinstance(p, Replicate) else p for p in parameter.placements]
    return parameter.to_local(grad_placements=gradients)


def adapter_sharding(base: SpmdLayout) -> ShardingConfig:
    """Return the layout of the adapters of an expert parameter [E, O, I], given the parameter's layout."""
    a_layout = b_layout = base
    if base != expert_param_placement_sparse():
        whole = expert_param_placement_dense(tp_placement=spmd.R)
        # Split over its output the parameter needs all of A, split over its input all of B.
        if base == expert_param_placement_dense(tp_placement=spmd.S(1)):
            a_layout = whole
        else:
            assert base == expert_param_placement_dense(tp_placement=spmd.S(2)), base
            b_layout = whole
    return ShardingConfig(state_shardings={"lora_a_ErI": a_layout, "lora_b_EOr": b_layout})


class LoraExperts(TrainingDtypeExperts):
    """Experts of which some projections have adapters."""

    @dataclass(kw_only=True, slots=True)
    class Config(TrainingDtypeExperts.Config):
        adapters: dict[str, GroupedAdapter.Config]
        """Adapters by the name of the parameter that they adapt."""
        scaling: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._lora_scaling = config.scaling
        self.adapters = ModuleDict({name: adapter.build() for name, adapter in config.adapters.items()})

    def _project(self, name: str, x_RI: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        base_RO = super()._project(name, x_RI, offsets_E)
        if name not in self.adapters:
            return base_RO
        return base_RO + self._lora_scaling * self.adapters[name](x_RI, offsets_E)

    def _down(self, gate_RF: torch.Tensor, up_RF: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        if "w2_EDF" not in self.adapters:
            return super()._down(gate_RF, up_RF, offsets_E)
        return self._project("w2_EDF", F.silu(gate_RF) * up_RF, offsets_E)
