"""How many bytes of tensors are allocated at once while some code runs."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Watches every tensor that an operator takes or makes; those of ``known`` do not count.

    Neither do files mapped into memory, whose pages the system takes back as it likes: their storages
    cannot be resized.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = {_storage(tensor) for tensor in known}
        self._live: dict[int, int] = {}
        self.num_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._watch(tensor)
        return out

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        is_mapped = not tensor.untyped_storage().resizable()
        if storage in self._known or storage in self._live or is_mapped:
            return
        self._live[storage] = tensor.untyped_storage().nbytes()
        self.num_bytes += self._live[storage]
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(tensor, self._forget, storage)

    def _forget(self, storage: int) -> None:
        self.num_bytes -= self._live.pop(storage)


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata
