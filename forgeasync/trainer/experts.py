"""TorchTitan's grouped experts, computed in the training dtype.

TorchTitan 0.3.0 casts inputs and weights of its experts to bfloat16 whatever the training dtype is. In an
fp32 run that alone puts sampler and trainer 1e-2 apart, and on a CPU it is slower. Can go when TorchTitan
computes experts in their own dtype.

Shape suffixes: E experts on this rank, F expert hidden size, D model dim, R tokens routed to this rank; I and
O the input and output size of one projection.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts

from forgeasync.trainer.grouped_mm import grouped_mm


class TrainingDtypeExperts(GroupedExperts):
    """SwiGLU experts over tokens sorted by expert, in the dtype of the weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        offsets_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        x = x_RD.to(self.w1_EFD.dtype)
        gate_RF = F.silu(self._project("w1_EFD", x, offsets_E))
        up_RF = self._project("w3_EFD", x, offsets_E)
        out_RD = self._project("w2_EDF", gate_RF * up_RF, offsets_E)
        return out_RD.type_as(x_RD)

    def _project(self, name: str, x_RI: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        """The parameter ``name`` [E, O, I] applied to [R, I]: [R, O]."""
        weight_EOI = getattr(self, name)
        if isinstance(weight_EOI, DTensor):
            weight_EOI = weight_EOI.to_local()
        return grouped_mm(x_RI, weight_EOI.transpose(-2, -1), offsets_E)
