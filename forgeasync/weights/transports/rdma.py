"""Weights of another host, through Monarch's RDMABuffer: ibverbs where there is the hardware, TCP elsewhere.

The publisher registers its staging buffers once, in segments, since a buffer can only be read whole.
"""

import asyncio
from collections.abc import Sequence

import torch
from monarch.rdma import RDMABuffer

from forgeasync.weights.layout import SEGMENT_BYTES
from forgeasync.weights.transports.transport import Arrived, ByteRange, StagingSource

MAX_READS_IN_FLIGHT = 4
"""Enough to hide a round trip behind the others' bytes."""


def register(buffer: torch.Tensor) -> tuple[RDMABuffer, ...]:
    """Handles of a staging buffer's segments; to be called inside an actor of the publishing proc."""
    return tuple(RDMABuffer(segment) for segment in buffer.split(SEGMENT_BYTES))


class RdmaTransport:
    """Reads whole segments."""

    granularity = SEGMENT_BYTES

    def __init__(self, source: StagingSource, timeout_s: int) -> None:
        """``timeout_s`` bounds the transfer of one segment."""
        self._source = source
        self._timeout_s = timeout_s

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], landing: torch.Tensor, arrived: Arrived
    ) -> None:
        """See ``Transport``; to be called inside an actor."""
        limit = asyncio.Semaphore(MAX_READS_IN_FLIGHT)

        async def read_segment(first: int, last: int) -> None:
            async with limit:
                handle = self._source.segments[slot][first // SEGMENT_BYTES]
                await handle.read_into(landing[first:last], timeout=self._timeout_s)
                await asyncio.to_thread(arrived, (first, last))

        async with asyncio.TaskGroup() as reads:
            for start, stop in ranges:
                for first in range(start, stop, SEGMENT_BYTES):
                    reads.create_task(read_segment(first, min(first + SEGMENT_BYTES, stop)))
