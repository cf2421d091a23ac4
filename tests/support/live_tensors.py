"""How many bytes of tensors are allocated at once while some code runs."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.trainers import local


class LiveTensors(TorchDispatchMode):
    """Watches the memory of every tensor that an operator takes or makes; that of ``known`` does not count.

    Memory counts from the first operator that sees it until the last tensor in it is gone, whatever keeps
    that alive (autograd included), and by its size at the time: FSDP2 frees gathered weights by resizing
    them to nothing. Files mapped into memory do not count: the system takes their pages back as it likes.
    Backward passes have to run in the calling thread (``torch.autograd.set_multithreading_enabled``).
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = {local(tensor).untyped_storage()._cdata for tensor in known}
        self._live: dict[int, int] = {}
        self.num_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> "LiveTensors":
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_
        watch, resize = self, self._resize

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            watch._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_count
        return super().__enter__()

    def __exit__(self, *reason: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*reason)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self._call(func, args, kwargs or {})
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._watch(tensor.untyped_storage())
        return out

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Operators defined in Python are looked into: they allocate on their way."""
        definition = OPDEFS.get(func._schema.name)
        if definition is None:
            return func(*args, **kwargs)
        TorchDispatchMode.__enter__(self)
        try:
            return definition._init_fn(*args, **kwargs)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or key in self._live or not storage.resizable():
            return
        self._live[key] = 0
        weakref.finalize(storage, self._forget, key)
        self._count(key, storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            self._count(storage._cdata, storage.nbytes())

    def _count(self, key: int, num_bytes: int) -> None:
        self.num_bytes += num_bytes - self._live[key]
        self._live[key] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def _forget(self, key: int) -> None:
        self.num_bytes -= self._live.pop(key)
