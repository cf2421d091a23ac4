"""Tensors that say they are on a GPU: what code does with them shows without one.

Their data are on the CPU. What only a CPU tensor can do, such as ``numpy()``, fails as on a real device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("cuda:0")

blocking_copies: list[torch.Size] = []
"""Shapes of the copies to the host that the host would have waited for."""


class OnDevice(torch.Tensor):
    """A tensor on ``cuda:0``."""

    data_on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> "OnDevice":
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=DEVICE
        )
        made.data_on_cpu = data
        return made

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """The operator itself: autograd's, which comes before the dispatch below, asks for a real device."""
        return torch.ops.aten.copy_.default(self, source, non_blocking)

    @classmethod
    def __torch_dispatch__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(keywords or {})
        name = str(function)
        target = arguments[0]
        goes_to_host = name.startswith("aten.copy_") and not isinstance(target, OnDevice)
        if goes_to_host:
            is_non_blocking = (len(arguments) > 2 and arguments[2]) or keywords.get("non_blocking")
            if not is_non_blocking:
                blocking_copies.append(target.shape)
        if name.startswith("aten._to_copy") and torch.device(keywords.get("device") or DEVICE).type == "cpu":
            blocking_copies.append(target.shape)
            goes_to_host = True
        keywords.pop("device", None)
        on_cpu = tree_map_only(OnDevice, lambda one: one.data_on_cpu, (arguments, keywords))
        result = function(*on_cpu[0], **on_cpu[1])
        if goes_to_host:
            return result
        return tree_map_only(torch.Tensor, OnDevice, result)
