"""Products of tokens, sorted by group, with a matrix of each group, also in dtypes that are not compiled.

Inductor of torch 2.13 lowers grouped products in bfloat16 only. In another dtype they are an operator that
compiled layers call as it is. Can go when it lowers float32 too.

Shape suffixes: E groups, R tokens, I and O the sizes of a matrix.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts


def grouped_mm(x_RI: torch.Tensor, weight_EIO: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """[R, O]: tokens up to ``offsets_E[e]`` (int32) times matrix e."""
    if x_RI.dtype == torch.bfloat16:
        return torch._grouped_mm(x_RI, weight_EIO, offs=offsets_E)
    return _product(x_RI, weight_EIO, offsets_E)


@torch.library.custom_op("forgeasync::grouped_mm", mutates_args=())
def _product(a: torch.Tensor, b: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """[R, I] and [E, I, O] to [R, O]; or, summed over each group's tokens, [I, R] and [R, O] to [E, I, O]."""
    return torch._grouped_mm(a, b, offs=offsets_E)


@_product.register_fake
def _(a: torch.Tensor, b: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    groups = [] if b.dim() == 3 else [len(offsets_E)]
    return a.new_empty(*groups, a.shape[0], b.shape[-1])


class _Context(FunctionCtx):
    saved_tensors: tuple[torch.Tensor, ...]


def _save(ctx: _Context, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: _Context, grad_RO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x_RI, weight_EIO, offsets_E = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    return (
        _product(grad_RO, weight_EIO.transpose(-2, -1), offsets_E) if needs_x else None,
        _product(x_RI.t(), grad_RO, offsets_E) if needs_weight else None,
        None,
    )


_product.register_autograd(_backward, setup_context=_save)


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
