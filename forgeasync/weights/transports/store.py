"""Weights through torchstore: the general path, where procs share neither memory nor RDMA handles.

The publisher puts every segment of a staging buffer under a key of its slot and generators get them: each
byte is moved twice, and the trainer waits for the first move.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

import torch
import torchstore
from monarch.actor import ProcMesh

from forgeasync.weights import torchstore_adapter as torchstore_adapter
from forgeasync.weights.layout import SEGMENT_BYTES
from forgeasync.weights.transports.transport import Arrived, ByteRange

MAX_SEGMENTS_IN_FLIGHT = 4
"""Enough to hide the store's several messages a segment behind the others' bytes."""


async def open_store(storage: ProcMesh) -> None:
    """Start torchstore with one storage volume on ``storage``; once per run, before publishing."""
    await torchstore.initialize(num_storage_volumes=1, mesh=storage)


def _key(rank: int, slot: int, segment: int) -> str:
    return f"weights/{rank}/{slot}/{segment}"


async def put(rank: int, slot: int, buffer: torch.Tensor) -> None:
    """Put a staging buffer (uint8) into the store."""
    segments = enumerate(buffer.split(SEGMENT_BYTES))
    await _run_some(torchstore.put(_key(rank, slot, index), segment) for index, segment in segments)


async def _run_some(moves: Iterable[Awaitable[None]]) -> None:
    limit = asyncio.Semaphore(MAX_SEGMENTS_IN_FLIGHT)

    async def run(move: Awaitable[None]) -> None:
        async with limit:
            await move

    async with asyncio.TaskGroup() as running:
        for move in moves:
            running.create_task(run(move))


class TorchstoreTransport:
    """Gets whole segments."""

    granularity = SEGMENT_BYTES

    def __init__(self, rank: int) -> None:
        self._rank = rank

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], landing: torch.Tensor, arrived: Arrived
    ) -> None:
        """See ``Transport``; to be called inside an actor."""

        async def get(first: int, last: int) -> None:
            segment = await torchstore.get(_key(self._rank, slot, first // SEGMENT_BYTES))

            def take() -> None:
                landing[first:last].copy_(segment)
                arrived((first, last))

            await asyncio.to_thread(take)

        await _run_some(
            get(first, min(first + SEGMENT_BYTES, stop))
            for start, stop in ranges
            for first in range(start, stop, SEGMENT_BYTES)
        )
