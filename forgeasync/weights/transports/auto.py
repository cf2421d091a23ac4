"""Transport that chooses the fastest way: shared memory within a host, RDMA between hosts."""

from collections.abc import Sequence

import torch

from forgeasync.weights.transports.rdma import RdmaTransport, Segments
from forgeasync.weights.transports.shared_memory import SharedMemoryTransport
from forgeasync.weights.transports.transport import Arrived, ByteRange, RankSource, RankStaging, Transport


class AutoTransport(Transport):
    """Transport by which each generator reads each trainer rank in the fastest way that their hosts allow."""

    async def open(self, staging: RankStaging) -> Segments | None:
        """Register buffers only if a generator is on another host, to save time and pinned memory."""
        if staging.generator_hosts <= {staging.host_id}:
            return None
        return await RdmaTransport().open(staging)

    def connect(self, source: RankSource) -> None:
        """Choose a transport and connect it."""
        is_local = source.staging.host_id == source.generator_host
        self.chosen: Transport = SharedMemoryTransport() if is_local else RdmaTransport()
        self.chosen.connect(source)
        self.granularity = self.chosen.granularity

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        """See ``Transport``."""
        await self.chosen.read(slot, ranges, received, arrived)
