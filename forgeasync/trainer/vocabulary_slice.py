"""The part of the vocabulary that a rank has, and sums over the parts of all ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySlice:
    """The part of the vocabulary that this rank's logits cover; ``group`` is None where it is the whole."""

    size: int
    """Size of the whole vocabulary."""
    start: int
    end: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, tensor: torch.Tensor, *, dim: int) -> "VocabularySlice":
        """The slice that a tensor's local part covers along its vocabulary dimension."""
        size = tensor.shape[dim]
        if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
            return cls(size=size, start=0, end=size, group=None)
        mesh, (placement, *others) = tensor.device_mesh, tensor.placements
        if placement.is_replicate():
            return cls(size=size, start=0, end=size, group=None)
        assert placement == Shard(dim) and not others, "logits are sharded over the vocabulary or not at all"
        width = -(-size // mesh.size())
        start = min(size, width * mesh.get_local_rank())
        return cls(size=size, start=start, end=min(size, start + width), group=mesh.get_group())

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over all slices, the same on every rank; its gradient goes to each rank as it is."""
        return partial if self.group is None else SumRanks.apply(partial, self.group)

    def max(self, partial: torch.Tensor) -> torch.Tensor:
        """The maximum over all slices, without gradient."""
        partial = partial.detach()
        if self.group is not None:
            dist.all_reduce(partial, dist.ReduceOp.MAX, self.group)
        return partial

    def share(self, whole: torch.Tensor) -> torch.Tensor:
        """A tensor that every rank has, for use with its own slice: gradients of all slices are summed."""
        return whole if self.group is None else _ShareWithSlices.apply(whole, self.group)


class SumRanks(torch.autograd.Function):
    """All-reduce forward, identity backward: every rank goes on with the same sum and the same loss."""

    @staticmethod
    def forward(ctx: object, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Context(FunctionCtx):
    group: dist.ProcessGroup


class _ShareWithSlices(torch.autograd.Function):
    """Identity forward, all-reduce backward: the counterpart of ``SumRanks``."""

    @staticmethod
    def forward(ctx: _Context, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
