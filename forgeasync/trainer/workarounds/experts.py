"""Compiled layers of TorchTitan 0.3.0 on torch 2.13, and experts in the dtype of their weights.

All layers share their code, and each must be a single graph (``fullgraph``). Two things then end a run:

- torch compiles code at most 8 times, and more is an error. Dense and MoE layers, passes with and without
  gradients, notes on routing, and the first and further sizes of rows each need a graph.
- With tensor parallelism the embedding returns the result of a collective that may still be in flight
  (``AsyncCollectiveTensor`` in a DTensor). torch compiles the first layer for it, and later runs this graph
  for other layers, whose inputs are plain tensors.

The first part can go when the limit is not an error, the second when guards look into DTensors.

Experts are products of tokens, sorted by group, with a matrix of each group.

Inductor of torch 2.13 lowers grouped products in bfloat16 only. In other dtypes they are a custom operator
that compiled layers call unchanged. Can go when Inductor lowers float32 too. TorchTitan 0.3.0 always computes
experts in bfloat16. Can go when it uses their own dtype.

The last product of an expert recomputes its input for the backward pass. Autograd would keep two more tensors
for every token and expert, half of what it keeps otherwise.

Shape suffixes: E groups, R tokens, I and O the sizes of a matrix, F the hidden size of an expert, D the
model's.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts

from forgeasync.weights import local_shard


def grouped_mm(x_RI: torch.Tensor, weight_EIO: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """Return [R, O]: tokens up to ``offsets_E[e]`` (int32) times matrix e."""
    if x_RI.dtype == torch.bfloat16:
        return torch._grouped_mm(x_RI, weight_EIO, offs=offsets_E)
    return _product(x_RI, weight_EIO, offsets_E)


@torch.library.custom_op("forgeasync::grouped_mm", mutates_args=())
def _product(a: torch.Tensor, b: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """Multiply the matrix of each group.

    [R, I] and [E, I, O] give [R, O]; [I, R] and [R, O], summed over each group's tokens, give [E, I, O].
    """
    return torch._grouped_mm(a, b, offs=offsets_E)


@_product.register_fake
def _(a: torch.Tensor, b: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    groups = [] if b.dim() == 3 else [len(offsets_E)]
    return a.new_empty(*groups, a.shape[0], b.shape[-1])


class _Context(FunctionCtx):
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]


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


class _Down(torch.autograd.Function):
    """``(silu(gate) * up)`` times the last matrix of each expert [E, F, D]; saves only gate and up."""

    @staticmethod
    def forward(
        ctx: _Context,
        gate_RF: torch.Tensor,
        up_RF: torch.Tensor,
        weight_EFD: torch.Tensor,
        offsets_E: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(gate_RF, up_RF, weight_EFD, offsets_E)
        return grouped_mm(F.silu(gate_RF).mul_(up_RF), weight_EFD, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_RF, up_RF, weight_EFD, offsets_E = ctx.saved_tensors
        silu_RF = F.silu(gate_RF)
        grad_weight_EFD = None
        if ctx.needs_input_grad[2]:
            hidden_RF = silu_RF * up_RF
            grad_weight_EFD = torch._grouped_mm(hidden_RF.t(), grad_RD, offs=offsets_E)
            del hidden_RF
        grad_RF = torch._grouped_mm(grad_RD, weight_EFD.transpose(-2, -1), offs=offsets_E)
        grad_up_RF = silu_RF.mul_(grad_RF)
        grad_gate_RF = torch.ops.aten.silu_backward(grad_RF.mul_(up_RF), gate_RF)
        return grad_gate_RF, grad_up_RF, grad_weight_EFD, None


class TrainingDtypeExperts(GroupedExperts):
    """SwiGLU experts over tokens sorted by expert, in the dtype of the weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        offsets_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        x = x_RD.to(self.w1_EFD.dtype)
        gate_RF = self._project("w1_EFD", x, offsets_E)
        up_RF = self._project("w3_EFD", x, offsets_E)
        return self._down(gate_RF, up_RF, offsets_E).type_as(x_RD)

    def _down(self, gate_RF: torch.Tensor, up_RF: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            # Inductor chooses what to recompute.
            return self._project("w2_EDF", F.silu(gate_RF) * up_RF, offsets_E)
        return _Down.apply(gate_RF, up_RF, self._matrices("w2_EDF"), offsets_E)

    def _project(self, name: str, x_RI: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        """Return the parameter ``name`` [E, O, I] applied to [R, I]: [R, O]."""
        return grouped_mm(x_RI, self._matrices(name), offsets_E)

    def _matrices(self, name: str) -> torch.Tensor:
        """Return this rank's part of the parameter ``name`` [E, O, I] as [E, I, O]."""
        return local_shard(getattr(self, name)).transpose(-2, -1)


MAX_GRAPHS = 64
"""Maximum number of graphs of a layer's code."""


def prepare_compiled_layers(model: Decoder) -> None:
    """Prepare a model, after its layers were compiled and before its first forward pass."""
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    # A copy waits for the collective. Without tensor parallelism there is none.
    model.tok_embeddings.register_forward_hook(
        lambda module, inputs, output: output.clone() if isinstance(output, DTensor) else output
    )
