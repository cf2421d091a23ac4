"""Publishing side of one trainer rank: chooses shards and copies them into the rank's staging buffers.

The training thread begins a publication and continues with the next forward and backward pass, while a thread
of the publisher completes the copies. The optimizer waits for them before it changes the weights
(``Publication.until_copied``). Generators wait for ``Publication.finished`` of every rank.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
import torch.distributed as dist

from forgeasync.weights.archive import ArchivePlan, ArchiveWriter
from forgeasync.weights.layout import Box, NamedWeight, assign_boxes, lay_out, local_shard, shard_box
from forgeasync.weights.ledger import NUM_SLOTS, StagedShard
from forgeasync.weights.staging import SlotWrite, StagingBuffers, staging_file
from forgeasync.weights.transports.transport import RankStaging, StagingSource, Transport


class Publication:
    """Version of this rank that is being published."""

    def __init__(self, write: SlotWrite, publisher: "WeightPublisher", *, version: int, slot: int) -> None:
        self._write = write
        self._publisher = publisher
        self._version = version
        self._slot = slot
        self._content = publisher.copying.submit(write.finish)
        # In the same thread, so that ``flush_archive`` waits for versions that are still being copied.
        self._archived = publisher.copying.submit(self._archive)

    def until_copied(self) -> None:
        """Wait until the shards may change. Call it in the training thread.

        Afterwards, later work of this thread on the GPU may change shards there. If copying fails,
        ``finished`` raises the error.
        """
        self._write.hold_stream()
        if self._write.reads_host:
            wait([self._content])

    async def finished(self) -> StagedShard:
        """Wait until the version is staged, and the transport and the archive have it, on this rank."""
        publisher, content = self._publisher, await asyncio.wrap_future(self._content)
        await publisher.transport.staged(self._slot)
        refusal = await asyncio.wrap_future(self._archived)
        return StagedShard(
            rank=publisher.layout.rank,
            version=self._version,
            checksums=content.checksums,
            patches=content.patches,
            archive_refusal=refusal,
        )

    def _archive(self) -> str | None:
        archive = self._publisher.archive
        return None if archive is None else archive.add(self._version, self._content.result())


class WeightPublisher:
    """Stages this rank's part of every version."""

    def __init__(
        self, weights: Sequence[NamedWeight], dtype: torch.dtype, *, host_id: str, has_patches: bool = False
    ) -> None:
        """Lay out the weights that this rank publishes, with patches behind them if there are any.

        Collective: every rank must pass the same weights in the same order.
        """
        boxes = [shard_box(weight.tensor) for weight in weights]
        boxes_by_rank: list[list[Box]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(boxes_by_rank, boxes)
        rank = dist.get_rank()
        self._host_id = host_id
        self._indices = assign_boxes(boxes_by_rank)[rank]
        self.layout = lay_out(
            weights,
            self._indices,
            rank=rank,
            host_id=host_id,
            itemsize=dtype.itemsize,
            has_patches=has_patches,
        )
        self._dtype = dtype
        self.archive: ArchiveWriter | None = None
        self.copying = ThreadPoolExecutor(1, thread_name_prefix="weight-copy")

    async def open(
        self,
        folder: Path,
        transport: Transport,
        *,
        generator_hosts: frozenset[str],
        archive: ArchivePlan | None = None,
    ) -> StagingSource:
        """Allocate the staging buffers, as files in ``folder`` of this host, and open ``transport`` on them.

        With ``archive``, every version is also written to files. Returns the address of the buffers for
        generators. Call it before the first ``begin``.
        """
        for slot in range(NUM_SLOTS):
            # An earlier rank may have left the file. Readers that have mapped it keep its contents.
            staging_file(folder, self.layout.rank, slot).unlink(missing_ok=True)
        self.buffers = StagingBuffers(folder, self.layout, self._dtype)
        self.staging = RankStaging(
            rank=self.layout.rank,
            host_id=self._host_id,
            paths=self.buffers.paths,
            buffers=tuple(self.buffers.bytes(slot) for slot in range(NUM_SLOTS)),
            generator_hosts=generator_hosts,
        )
        self.transport = transport
        self.archive = None if archive is None else ArchiveWriter(archive, self.layout, self._dtype)
        address = await transport.open(self.staging)
        return StagingSource(host_id=self._host_id, paths=self.buffers.paths, address=address)

    def flush_archive(self) -> str | None:
        """Wait until the archive, if there is one, has all versions whose publication has begun.

        Returns why the archive leaves out versions; None if it has all of them.
        """
        return None if self.archive is None else self.copying.submit(self.archive.flush).result()

    # With gradients enabled, a DTensor would wrap its local tensor.
    @torch.no_grad()
    def begin(self, slot: int, version: int, weights: Sequence[NamedWeight]) -> Publication:
        """Begin to copy the shards that this rank publishes into a slot.

        Call it in the training thread, which must call ``until_copied`` of the result before the weights
        change.
        """
        shards = [local_shard(weights[index].tensor) for index in self._indices]
        return Publication(self.buffers.begin(slot, shards), self, version=version, slot=slot)
