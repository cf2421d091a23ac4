"""Parameters batched into few large tensors: a run of 30B parameters has 18,000 of them.

Parameters of equal shape, dtype and layout are stacked along a new first dimension; sharding placements
move one dimension up. Planning looks at metadata only and is the same on every rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeight:
    """A tensor (or this rank's shard of one, as a DTensor) and what generators call it.

    Several ``names`` mean that the tensor stacks that many tensors along its first dimension (experts).
    """

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def layout(self) -> tuple[object, ...]:
        """Weights with equal layouts can share a bucket."""
        sharding = (
            (self.tensor.device_mesh, self.tensor.placements) if isinstance(self.tensor, DTensor) else ()
        )
        return (len(self.names), tuple(self.tensor.shape), self.tensor.dtype, sharding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Weights that travel as one tensor; ``names[i]`` are those of its i-th slice."""

    index: int
    names: tuple[tuple[str, ...], ...]


def plan_buckets(weights: Sequence[NamedWeight], *, max_bytes: int) -> list[tuple[Bucket, list[NamedWeight]]]:
    """Group weights by layout, at most ``max_bytes`` of whole tensors a bucket; at least one weight each."""
    by_layout: dict[tuple[object, ...], list[NamedWeight]] = {}
    for weight in weights:
        by_layout.setdefault(weight.layout, []).append(weight)
    plan: list[tuple[Bucket, list[NamedWeight]]] = []
    for alike in by_layout.values():
        weight_bytes = alike[0].tensor.numel() * alike[0].tensor.element_size()
        size = max(1, max_bytes // max(1, weight_bytes))
        for start in range(0, len(alike), size):
            members = alike[start : start + size]
            bucket = Bucket(index=len(plan), names=tuple(weight.names for weight in members))
            plan.append((bucket, members))
    return plan


def stack(weights: Sequence[NamedWeight], dtype: torch.dtype) -> torch.Tensor:
    """A copy of equally laid out weights as one tensor; of DTensors, a DTensor of the stacked shards."""
    first = weights[0].tensor
    if not isinstance(first, DTensor):
        return torch.stack([weight.tensor.detach() for weight in weights]).to(dtype)
    local = torch.stack([weight.tensor.to_local().detach() for weight in weights]).to(dtype)
    shape = torch.Size([len(weights), *first.shape])
    return DTensor.from_local(
        local,
        first.device_mesh,
        [_one_dimension_up(placement) for placement in first.placements],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def unstack(bucket: Bucket, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The (name, tensor) pairs of a bucket's whole tensor; views, nothing is copied."""
    for names, stacked in zip(bucket.names, tensor.unbind(0), strict=True):
        if len(names) == 1:
            yield names[0], stacked
        else:
            yield from zip(names, stacked.unbind(0), strict=True)


def _one_dimension_up(placement: Placement) -> Placement:
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return Shard(placement.dim + 1)
    return placement
