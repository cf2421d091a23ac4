"""Transport within a host: maps the publisher's buffers and copies them."""

import asyncio
from collections.abc import Sequence

import numpy as np
import torch

from forgeasync.weights.ledger import BLOCK_BYTES
from forgeasync.weights.staging import SharedFile
from forgeasync.weights.transports.transport import Arrived, ByteRange, RankSource, RankStaging, Transport


class SharedMemoryTransport(Transport):
    """Transport that copies block by block; each block is checked while it is in the CPU's cache."""

    granularity = BLOCK_BYTES
    crosses_hosts = False

    async def open(self, staging: RankStaging) -> None:
        """Do nothing: the buffers are files of this host already."""

    def connect(self, source: RankSource) -> None:
        """Map the publisher's files."""
        self._slots = [
            SharedFile(path, source.num_bytes, is_new=False).bytes[: source.num_bytes].numpy()
            for path in source.staging.paths
        ]

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        """See ``Transport``; runs in a thread, so that the engine keeps decoding."""
        await asyncio.to_thread(self._copy, slot, ranges, received, arrived)

    def _copy(self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived) -> None:
        # In numpy: slicing a tensor takes ten times as long as slicing an array.
        staged, target = self._slots[slot], received.numpy()
        for start, stop in ranges:
            for first in range(start, stop, BLOCK_BYTES):
                last = min(first + BLOCK_BYTES, stop)
                np.copyto(target[first:last], staged[first:last])
                arrived((first, last))
