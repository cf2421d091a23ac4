"""Transport between hosts through Monarch's RDMABuffer, over ibverbs if available, otherwise TCP.

The publisher registers its staging buffers once, in segments, because an RDMABuffer can only be read whole.
"""

import asyncio
from collections.abc import Sequence

import torch
from monarch.rdma import RDMABuffer

from forgeasync.weights.layout import SEGMENT_BYTES
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
