"""Weights through torchstore: the general path, where procs share neither memory nor RDMA handles.

The publisher puts every segment of a staging buffer under a key of its slot and generators get them: each
byte is moved twice.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

import torch
import torchstore

from forgeasync.weights.layout import SEGMENT_BYTES
from forgeasync.weights.transports import torchstore_adapter as torchstore_adapter
from forgeasync.weights.transports.transport import (
    Arrived,
    ByteRange,
    RankSource,
    RankStaging,
    SpawnProc,
    Transport,
)

MAX_SEGMENTS_IN_FLIGHT = 4
"""Enough to hide the store's several messages a segment behind the others' bytes."""


class TorchstoreTransport(Transport):
    """Puts and gets whole segments; all but ``start`` is to be called inside an actor."""

    granularity = SEGMENT_BYTES

    async def start(self, spawn: SpawnProc) -> None:
        """Start torchstore, with one storage volume in a proc of its own."""
        await torchstore.initialize(num_storage_volumes=1, mesh=spawn("weights"))

    async def open(self, staging: RankStaging) -> None:
        """Do nothing before there is a version."""
        self._rank, self._buffers = staging.rank, staging.buffers

    async def staged(self, slot: int) -> None:
        """Put the buffer into the store."""
        segments = enumerate(self._buffers[slot].split(SEGMENT_BYTES))
        await _run_some(torchstore.put(self._key(slot, index), segment) for index, segment in segments)

    def connect(self, source: RankSource) -> None:
        """The store is found by its name."""
        self._rank = source.rank

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        """See ``Transport``."""

        async def get(first: int, last: int) -> None:
            segment = await torchstore.get(self._key(slot, first // SEGMENT_BYTES))

            def take() -> None:
                received[first:last].copy_(segment)
                arrived((first, last))

            await asyncio.to_thread(take)

        await _run_some(
            get(first, min(first + SEGMENT_BYTES, stop))
            for start, stop in ranges
            for first in range(start, stop, SEGMENT_BYTES)
        )

    def _key(self, slot: int, segment: int) -> str:
        return f"weights/{self._rank}/{slot}/{segment}"


async def _run_some(moves: Iterable[Awaitable[None]]) -> None:
    limit = asyncio.Semaphore(MAX_SEGMENTS_IN_FLIGHT)

    async def run(move: Awaitable[None]) -> None:
        async with limit:
            await move

    async with asyncio.TaskGroup() as running:
        for move in moves:
            running.create_task(run(move))
