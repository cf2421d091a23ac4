"""One trainer rank's side of publishing: it chooses shards and copies them into its staging buffers."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forgeasync.weights.layout import NamedWeight, assign_boxes, lay_out, shard_box
from forgeasync.weights.manifest import StagedShard
from forgeasync.weights.staging import NUM_SLOTS, StagingBuffers
from forgeasync.weights.transports.transport import RankStaging, StagingSource, Transport


class WeightPublisher:
    """Stages this rank's part of every version."""

    def __init__(self, weights: Sequence[NamedWeight], dtype: torch.dtype, *, host_id: str) -> None:
        """Lay out what this rank publishes; collective: every rank has the same weights in order."""
        boxes = [shard_box(weight.tensor) for weight in weights]
        boxes_by_rank: list[list[object]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(boxes_by_rank, boxes)
        rank = dist.get_rank()
        self._host_id = host_id
        self._indices = assign_boxes(boxes_by_rank)[rank]
        self.layout = lay_out(weights, self._indices, rank=rank, host_id=host_id, itemsize=dtype.itemsize)
        self._dtype = dtype

    async def open(
        self, folder: Path, transport: Transport, *, generator_hosts: frozenset[str]
    ) -> StagingSource:
        """Allocate the staging buffers, as files in ``folder`` of this host, and open ``transport`` on them.

        Returns how generators reach them. Must be called before the first ``publish``.
        """
        self.buffers = StagingBuffers(folder, self.layout, self._dtype)
        self.staging = RankStaging(
            rank=self.layout.rank,
            host_id=self._host_id,
            paths=self.buffers.paths,
            buffers=tuple(self.buffers.bytes(slot) for slot in range(NUM_SLOTS)),
            generator_hosts=generator_hosts,
        )
        self.transport = transport
        address = await transport.open(self.staging)
        return StagingSource(host_id=self._host_id, paths=self.buffers.paths, address=address)

    async def publish(self, slot: int, version: int, weights: Sequence[NamedWeight]) -> StagedShard:
        """Copy the shards that this rank publishes into a slot, and let the transport have them.

        Does not wait for other ranks.
        """
        staged = self._stage(slot, version, weights)
        await self.transport.staged(slot)
        return staged

    # Without gradients a DTensor hands out its local tensor as it is.
    @torch.no_grad()
    def _stage(self, slot: int, version: int, weights: Sequence[NamedWeight]) -> StagedShard:
        tensors = [weights[index].tensor for index in self._indices]
        shards = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return self.buffers.write(slot, version, shards)
