"""Makes torchstore 0.1.2 run on Monarch 0.7.0. Import it before torchstore is used, in every process.

Monarch 0.7.0 refuses actors that mix synchronous and asynchronous endpoints; torchstore's controller does.
The subclass here declares its synchronous endpoints again as asynchronous ones. Can go with the first
torchstore release that supports Monarch 0.7.
"""

import torchstore.api
from monarch.actor import endpoint
from torchstore.controller import Controller as _ReleasedController
from torchstore.controller import StorageInfo
from torchstore.strategy import TorchStoreStrategy
from torchstore.transport.pipe import Request


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


torchstore.api.Controller = Controller
