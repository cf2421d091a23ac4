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

gpt-oss's experts have biases and another activation, and the layout of its files, which vLLM loads.
TorchTitan stores them transposed.

Shape suffixes: E groups, R tokens, I and O the sizes of a matrix, F the hidden size of an expert, G twice
that, D the model's.
"""

from dataclasses import dataclass

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward, swiglu
from torchtitan.protocols.module import Module

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
        """Return the outputs [R, D] of tokens [R, D] that are sorted by expert."""
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


class _Biased(torch.autograd.Function):
    """Products [R, O] plus the bias [E, O] of each token's expert, whose gradient is summed in float32."""

    @staticmethod
    def forward(
        ctx: _Context, x_RO: torch.Tensor, bias_EO: torch.Tensor, offsets_E: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(offsets_E)
        rows_R = torch.arange(len(x_RO), dtype=offsets_E.dtype, device=x_RO.device)
        # Rows behind the last expert's belong to none.
        experts_R = torch.searchsorted(offsets_E, rows_R, right=True).clamp(max=len(bias_EO) - 1)
        return x_RO + bias_EO[experts_R]

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_RO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (offsets_E,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad_RO, None, None
        # Rows of operands of a grouped product have at least 16 bytes.
        ones_R8 = grad_RO.new_ones(len(grad_RO), 8)
        return grad_RO, grouped_mm(ones_R8.t(), grad_RO, offsets_E)[:, 0], None


class _ClampedDown(torch.autograd.Function):
    """gpt-oss's activation times the last matrix of each expert [E, F, D]; saves only gate and up."""

    @staticmethod
    def forward(
        ctx: _Context, gate_up_RG: torch.Tensor, weight_EFD: torch.Tensor, offsets_E: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gate_up_RG, weight_EFD, offsets_E)
        return grouped_mm(swiglu(gate_up_RG), weight_EFD, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_RD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_up_RG, weight_EFD, offsets_E = ctx.saved_tensors
        with torch.enable_grad():
            inner_RG = gate_up_RG.detach().requires_grad_()
            hidden_RF = swiglu(inner_RG)
        grad_weight_EFD = None
        if ctx.needs_input_grad[1]:
            grad_weight_EFD = torch._grouped_mm(hidden_RF.detach().t(), grad_RD, offs=offsets_E)
        grad_RF = torch._grouped_mm(grad_RD, weight_EFD.transpose(-2, -1), offs=offsets_E)
        return *torch.autograd.grad(hidden_RF, inner_RG, grad_RF), grad_weight_EFD, None


class ClampedExperts(GptOssGroupedExperts):
    """gpt-oss's experts over tokens sorted by expert, in the dtype and layout of its files.

    Gate and up take turns in the last dimension of ``gate_up_proj``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def __init__(self, config: Config) -> None:
        # Skip the parameters of another layout.
        Module.__init__(self)
        num, dim, inner = config.num_experts, config.dim, config.hidden_dim
        self.num_experts = num
        self.gate_up_proj = torch.nn.Parameter(torch.empty(num, dim, 2 * inner))
        self.gate_up_proj_bias = torch.nn.Parameter(torch.empty(num, 2 * inner))
        self.down_proj = torch.nn.Parameter(torch.empty(num, inner, dim))
        self.down_proj_bias = torch.nn.Parameter(torch.empty(num, dim))

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return the outputs [R, D] of tokens [R, D] that are sorted by expert."""
        offsets_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        up, up_bias, down, down_bias = map(
            local_shard, (self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias)
        )
        gate_up_RG = _Biased.apply(grouped_mm(x_RD.to(up.dtype), up, offsets_E), up_bias, offsets_E)
        if torch.compiler.is_compiling():
            out_RD = grouped_mm(swiglu(gate_up_RG), down, offsets_E)
        else:
            out_RD = _ClampedDown.apply(gate_up_RG, down, offsets_E)
        # With tensor parallelism inside experts the outputs of ranks are added.
        num_parts, mesh = 1, self.down_proj.device_mesh if isinstance(self.down_proj, DTensor) else None
        if mesh is not None and "tp" in (names := mesh.mesh_dim_names or ()):
            num_parts = mesh.size(names.index("tp"))
        bias_ED = ScaleBiasForward.apply(down_bias, num_parts, down_bias.dtype)
        return _Biased.apply(out_RD, bias_ED, offsets_E).type_as(x_RD)


def lay_out_experts(model: Decoder.Config, *, enable_ep: bool, enable_sp: bool) -> None:
    """Split ``ClampedExperts`` over ranks, as TorchTitan does with the parameters of its layout."""
    for layer in model.layers:
        if layer.moe is not None and isinstance(
            layer.moe.routed_experts.inner_experts, ClampedExperts.Config
        ):
            set_moe_sharding_config(
                layer.moe,
                enable_ep=enable_ep,
                enable_sp=enable_sp,
                expert_param_layout={
                    "gate_up_proj": spmd.S(2),
                    "gate_up_proj_bias": spmd.S(1),
                    "down_proj": spmd.S(1),
                    "down_proj_bias": spmd.R,
                },
            )


MAX_GRAPHS = 64
"""Maximum number of graphs of a layer's code."""


def prepare_compiled_layers(model: Decoder) -> None:
    """Prepare a model, after its layers were compiled and before its first forward pass."""
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    # A copy waits for the collective. Without tensor parallelism there is none.
    model.tok_embeddings.register_forward_hook(
        lambda module, inputs, output: output.clone() if isinstance(output, DTensor) else output
    )
