"""Transport through torchstore, for processes that share neither memory nor RDMA handles.

The publisher puts every segment of a staging buffer under a key of its slot, and generators get them, so each
byte is moved twice.

The module makes torchstore 0.1.2 run on Monarch 0.7.0. Import it before torchstore is used, in every process.
Monarch 0.7.0 refuses actors that mix synchronous and asynchronous endpoints, as torchstore's controller does;
``Controller`` declares its synchronous endpoints as asynchronous ones. Can go with the first torchstore
release that supports Monarch 0.7.

Without ibverbs hardware torchstore 0.1.2 sends tensors as actor messages, 100 MB in 7 s. Monarch's RDMABuffer
works there too, over TCP, at least ten times as fast, and ``Pipe`` is changed to use it. Can go when
torchstore checks ``get_rdma_backend()`` instead of ibverbs.
"""

import asyncio
from collections.abc import Sequence

import torch
import torchstore
import torchstore.api
from monarch.actor import endpoint
from monarch.rdma import RDMABuffer, get_rdma_backend
from torchstore.controller import Controller as _ReleasedController
from torchstore.controller import StorageInfo
from torchstore.strategy import TorchStoreStrategy
from torchstore.transport.buffers import MonarchTransportBuffer, RDMATransportBuffer, TransportBuffer
from torchstore.transport.pipe import Pipe, Request

from forgeasync.weights.layout import SEGMENT_BYTES
from forgeasync.weights.transports.transport import (
    Arrived,
    ByteRange,
    RankSource,
    RankStaging,
    SpawnProc,
    Transport,
    move_segments,
)


class Controller(_ReleasedController):
    """torchstore's controller with asynchronous endpoints only."""

    @endpoint
    async def get_controller_strategy(self) -> TorchStoreStrategy:
        self.assert_initialized()
        assert self.strategy is not None
        return self.strategy

    @endpoint
    async def locate_volumes(self, key: str) -> dict[str, StorageInfo]:
        return _ReleasedController.locate_volumes._method(self, key)

    @endpoint
    async def notify_put(self, key: str, request: Request, storage_volume_id: str) -> None:
        _ReleasedController.notify_put._method(self, key, request, storage_volume_id)

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        return _ReleasedController.keys._method(self, prefix)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        _ReleasedController.notify_delete._method(self, key, storage_volume_id)


class FlatTransportBuffer(RDMATransportBuffer):
    """Moves flat tensors in place, without the two copies that the released class makes."""

    def allocate(self, tensor_like: torch.Tensor | tuple[torch.Size, torch.dtype] | str | None) -> None:
        """Register the tensor to put, or memory for the one to get, by its shape and dtype."""
        if tensor_like is None or isinstance(tensor_like, str):
            return  # an object is sent in the message
        if isinstance(tensor_like, torch.Tensor):
            tensor = tensor_like
        else:
            tensor = torch.empty(tensor_like[0], dtype=tensor_like[1])
        assert tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"
        self.shape, self.dtype, self.dim = tensor.shape, tensor.dtype, 1
        self.tensor_refs = [tensor]
        self.rdma_buffers = [RDMABuffer(tensor.view(torch.uint8))]

    async def read_into(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """Return the received tensor on the client, or the tensor to store in the volume."""
        if self.tensor_refs is None:
            return await super().read_into(tensor)
        assert tensor is None
        return self.tensor_refs[0]

    async def write_from(self, tensor: torch.Tensor | None) -> None:
        """Do nothing on the client for tensors: the volume has received them."""
        if self.tensor_refs is None:
            await super().write_from(tensor)


def _create_transport_buffer(self: Pipe) -> TransportBuffer:
    return MonarchTransportBuffer() if get_rdma_backend() == "none" else FlatTransportBuffer()


torchstore.api.Controller = Controller
Pipe.create_transport_buffer = _create_transport_buffer


class TorchstoreTransport(Transport):
    """Transport that puts and gets whole segments. Call all methods but ``start`` inside an actor."""

    granularity = SEGMENT_BYTES

    async def start(self, spawn: SpawnProc) -> None:
        """Start torchstore, with one storage volume in its own process."""
        await torchstore.initialize(num_storage_volumes=1, mesh=spawn("weights"))

    async def open(self, staging: RankStaging) -> None:
        """Keep the buffers; nothing is put before there is a version."""
        self._rank, self._buffers = staging.rank, staging.buffers

    async def staged(self, slot: int) -> None:
        """Put the buffer into the store."""
        buffer = self._buffers[slot]

        async def put(first: int, last: int) -> None:
            await torchstore.put(self._key(slot, first // SEGMENT_BYTES), buffer[first:last])

        await move_segments([(0, len(buffer))], put)

    def connect(self, source: RankSource) -> None:
        """Set the rank to read; the store itself is found by its name."""
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

        await move_segments(ranges, get)

    def _key(self, slot: int, segment: int) -> str:
        return f"weights/{self._rank}/{slot}/{segment}"
