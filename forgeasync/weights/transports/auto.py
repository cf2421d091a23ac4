"""Transport that chooses the fastest way: shared memory within a host, RDMA or else TCP between hosts."""

from collections.abc import Sequence

import torch
from monarch.rdma import get_rdma_backend

from forgeasync.weights.transports.rdma import RdmaTransport, Segments
from forgeasync.weights.transports.shared_memory import SharedMemoryTransport
from forgeasync.weights.transports.tcp import TcpAddress, TcpTransport
from forgeasync.weights.transports.transport import Arrived, ByteRange, RankSource, RankStaging, Transport


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
