"""Weights through torchstore: the general path, where procs share neither memory nor RDMA handles.

The publisher puts every segment of a staging buffer under a key of its slot and generators get them: each
byte is moved twice, and the trainer waits for the first move.
"""

from collections.abc import Sequence

import torch
import torchstore
from monarch.actor import ProcMesh

from forgeasync.weights import torchstore_adapter as torchstore_adapter
from forgeasync.weights.layout import SEGMENT_BYTES
from forgeasync.weights.transports.transport import Arrived, ByteRange


async def open_store(storage: ProcMesh) -> None:
    """Start torchstore with one storage volume on ``storage``; once per run, before publishing."""
    await torchstore.initialize(num_storage_volumes=1, mesh=storage)


def _key(rank: int, slot: int, segment: int) -> str:
    return f"weights/{rank}/{slot}/{segment}"


async def put(rank: int, slot: int, buffer: torch.Tensor) -> None:
    """Put a staging buffer (uint8) into the store."""
    for index, segment in enumerate(buffer.split(SEGMENT_BYTES)):
        await torchstore.put(_key(rank, slot, index), segment)


class TorchstoreTransport:
    """Gets whole segments."""

    granularity = SEGMENT_BYTES

    def __init__(self, rank: int) -> None:
        self._rank = rank

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], landing: torch.Tensor, arrived: Arrived
    ) -> None:
        """See ``Transport``; to be called inside an actor."""
        for start, stop in ranges:
            for first in range(start, stop, SEGMENT_BYTES):
                last = min(first + SEGMENT_BYTES, stop)
                segment = await torchstore.get(_key(self._rank, slot, first // SEGMENT_BYTES))
                landing[first:last].copy_(segment)
                arrived((first, last))
