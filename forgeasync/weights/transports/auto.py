"""The fastest way that there is between two hosts: shared memory on one, RDMA between two."""

from collections.abc import Sequence

import torch

from forgeasync.weights.transports.rdma import RdmaTransport, Segments
from forgeasync.weights.transports.shared_memory import SharedMemoryTransport
from forgeasync.weights.transports.transport import Arrived, ByteRange, RankSource, RankStaging, Transport


class AutoTransport(Transport):
    """Each generator reads each trainer rank in the way that their hosts allow."""

    async def open(self, staging: RankStaging) -> Segments | None:
        """Register buffers only if a generator is on another host: that costs time and pinned memory."""
        if staging.generator_hosts <= {staging.host_id}:
            return None
        return await RdmaTransport().open(staging)

    def connect(self, source: RankSource) -> None:
        """Choose, and connect so."""
        is_local = source.staging.host_id == source.generator_host
        self.chosen: Transport = SharedMemoryTransport() if is_local else RdmaTransport()
        self.chosen.connect(source)
        self.granularity = self.chosen.granularity

    async def read(
        self, slot: int, ranges: Sequence[ByteRange], received: torch.Tensor, arrived: Arrived
    ) -> None:
        """See ``Transport``."""
        await self.chosen.read(slot, ranges, received, arrived)
