"""Computes sums in float32 that TorchTitan 0.3.0 and torch 2.13 round at every addition in a low dtype.

These are the outputs of a token's experts, and the gradients that experts return to a token. On CPUs they are
also the gradients of an embedding from all places of its token in the batch. Float32 and float64 are not
changed. Each part can go when the original sums in float32.

Shape suffixes: T tokens, D model dim, K top-k, N routed tokens (T * K), R those of this rank's experts, V
this rank's slice of the vocabulary, L any leading dims.
"""

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.token_dispatcher import (
    AllToAllDispatchMetadata,
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
)
from torchtitan.protocols.module import Module

from forgeasync.trainer.head_weight import RowSums


def is_low(dtype: torch.dtype) -> bool:
    """Return whether sums in a dtype are less precise than in float32."""
    return dtype.itemsize < torch.float32.itemsize


def as_config(module: type[Module], config: Module.Config) -> Module.Config:
    """Return the same config, for a subclass of the module that it builds."""
    return module.Config(**{one.name: getattr(config, one.name) for one in dataclasses.fields(config)})


class _Context(FunctionCtx):
    saved_tensors: tuple[torch.Tensor, ...]
    top_k: int
    sums: RowSums


class _Routed(torch.autograd.Function):
    """Rows [N, D] of tokens, each ``top_k`` times."""

    @staticmethod
    def forward(ctx: _Context, x_TD: torch.Tensor, token_N: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(token_N)
        ctx.top_k = top_k
        return x_TD[token_N]

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_ND: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (token_N,) = ctx.saved_tensors
        place_TK = token_N.argsort(stable=True).view(-1, ctx.top_k)
        total_TD = grad_ND.new_zeros(len(place_TK), grad_ND.shape[1], dtype=torch.float32)
        # One row of each token at a time: all of them in float32 would take several times the memory.
        for place_T in place_TK.unbind(1):
            total_TD += grad_ND[place_T]
        return total_TD.to(grad_ND.dtype), None, None


class SummingDispatcher(AllToAllTokenDispatcher):
    """TorchTitan's dispatcher, with sums over a token's experts, forward and backward, rounded once."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def _local_reorder(
        self, x_TD: torch.Tensor, topk_scores_TK: torch.Tensor, topk_expert_ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not is_low(x_TD.dtype):
            return super()._local_reorder(x_TD, topk_scores_TK, topk_expert_ids_TK)
        _, token_N, scores_N = super()._local_reorder(x_TD[:, :0], topk_scores_TK, topk_expert_ids_TK)
        return _Routed.apply(x_TD, token_N, self.top_k), token_N, scores_N

    def combine(
        self,
        routed_output_RD: torch.Tensor,
        metadata: AllToAllDispatchMetadata | LocalDispatchMetadata,
        x_TD: torch.Tensor,
    ) -> torch.Tensor:
        """Return the combined output [T, D] of each token's experts."""
        if not is_low(x_TD.dtype):
            return super().combine(routed_output_RD, metadata, x_TD)
        if self.ep_mesh is None:
            routed_output_RD = routed_output_RD.float()
        # Only its shape, dtype and device are read.
        wide_TD = x_TD.new_zeros((), dtype=torch.float32).expand(x_TD.shape)
        return super().combine(routed_output_RD, metadata, wide_TD).to(x_TD.dtype)

    def _combine_token_exchange(
        self, routed_output_RD: torch.Tensor, *arguments: object, **keywords: object
    ) -> torch.Tensor:
        """Send in the low dtype, sum in float32."""
        received_ND = super()._combine_token_exchange(routed_output_RD, *arguments, **keywords)
        return received_ND.float() if is_low(received_ND.dtype) else received_ND


class Float32Gate(Linear):
    """Router gate in float32.

    TorchTitan uses autocast for this, which on CPUs supports only lower dtypes and has no effect.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return scores before softmax or sigmoid."""
        if not is_low(self.weight.dtype):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


class _Embedded(torch.autograd.Function):
    """Rows [L, D] of a weight [V, D] by ids [L]."""

    @staticmethod
    def forward(ctx: _Context, weight_VD: torch.Tensor, id_L: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(id_L)
        ctx.sums = RowSums(weight_VD)
        return F.embedding(id_L, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_LD: torch.Tensor) -> tuple[torch.Tensor, None]:
        (id_L,) = ctx.saved_tensors
        rows, row_L = ctx.sums.rows_of(id_L.flatten())
        rows.index_put_((row_L,), grad_LD.flatten(0, -2).to(rows.dtype), accumulate=True)
        return ctx.sums.take(), None


class CpuEmbedding(Embedding):
    """TorchTitan's embedding, with the gradient of a token that occurs often rounded once.

    On GPUs torch's own backward pass sums in float32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return embeddings [L, D] of ids [L]; with tensor parallelism, zeros for ids of other ranks."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        if not is_low(weight.dtype):
            return super().forward(input)
        if self.tp_group is None:
            return _Embedded.apply(weight, input)
        num_ranks = dist.get_world_size(self.tp_group)
        start = dist.get_rank(self.tp_group) * -(-self.num_embeddings // num_ranks)
        is_own = (input >= start) & (input < start + len(weight))
        out = _Embedded.apply(weight, (input - start).clamp(0, len(weight) - 1))
        return out * is_own.unsqueeze(-1).to(out.dtype)
