"""Transport between hosts through Monarch's RDMABuffer, and the transport that chooses the fastest one.

An RDMABuffer goes over ibverbs if available, otherwise TCP.

The publisher registers its staging buffers once, in segments, because an RDMABuffer can only be read whole.
"""

import asyncio
from collections.abc import Sequence

import torch
from monarch.rdma import RDMABuffer, get_rdma_backend

from forgeasync.weights.layout import SEGMENT_BYTES
from forgeasync.weights.transports.shared_memory import SharedMemoryTransport
from forgeasync.weights.transports.tcp import TcpAddress, TcpTransport
from forgeasync.weights.transports.transport import (
    Arrived,
    ByteRange,
    RankSource,
    RankStaging,
    Transport,
    move_segments,
)

Segments = tuple[tuple[RDMABuffer, ...], ...]
"""Handles of consecutive segments of ``SEGMENT_BYTES``, by slot."""


class RdmaTransport(Transport):
    """Transport that reads whole segments. Call ``open`` and ``read`` inside an actor."""

    granularity = SEGMENT_BYTES

    async def open(self, staging: RankStaging) -> Segments:
        """Register both buffers."""
        return tuple(
            tuple(RDMABuffer(segment) for segment in buffer.split(SEGMENT_BYTES))
            for buffer in staging.buffers
        )

    def connect(self, source: RankSource) -> None:
        """Use the registered buffers; each segment must be transferred within the lease timeout."""
        assert isinstance(source.staging.address, tuple)
        self._segments: Segments = source.staging.address
        # RDMABuffer's timeout is in whole seconds.
        self._timeout_s = int(source.lease_timeout_s)

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        """See ``Transport``."""

        async def read_segment(first: int, last: int) -> None:
            handle = self._segments[slot][first // SEGMENT_BYTES]
            await handle.read_into(received[first:last], timeout=self._timeout_s)
            await asyncio.to_thread(arrived, (first, last))

        await move_segments(ranges, read_segment)


class AutoTransport(Transport):
    """Transport by which each generator reads each trainer rank in the fastest way that their hosts allow."""

    async def open(self, staging: RankStaging) -> Segments | TcpAddress | None:
        """Open a way to other hosts only if a generator is on one, to save time and pinned memory."""
        if staging.generator_hosts <= {staging.host_id}:
            return None
        if get_rdma_backend() == "ibverbs":
            return await RdmaTransport().open(staging)
        # Monarch's own way over TCP is slower.
        return await TcpTransport().open(staging)

    def connect(self, source: RankSource) -> None:
        """Choose a transport and connect it."""
        self.chosen: Transport
        if source.staging.host_id == source.generator_host:
            self.chosen = SharedMemoryTransport()
        elif isinstance(source.staging.address, TcpAddress):
            self.chosen = TcpTransport()
        else:
            self.chosen = RdmaTransport()
        self.chosen.connect(source)
        self.granularity = self.chosen.granularity

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        """See ``Transport``."""
        await self.chosen.read(slot, ranges, received, arrived)
