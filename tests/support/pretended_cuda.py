"""A CUDA GPU for code that asks torch for one by name: tensors lie on the CPU, streams and graphs are played.

It shows that such code runs and in which order it waits; what a real device computes and how fast, it does
not. Tensors that say they are on a GPU, with what that forbids: tests/support/pretended_device.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

GIB = 2**30


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on "cuda", and pageable what is asked for page-locked."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        keywords = {name: _moved(value) for name, value in (keywords or {}).items()}
        keywords.pop("pin_memory", None)
        return function(*map(_moved, arguments), **keywords)


def _moved(value: Any) -> Any:
    return "cpu" if isinstance(value, (str, torch.device)) and str(value) == "cuda" else value


class Graph(TorchDispatchMode):
    """Writes down what is computed within it, and computes it again from and into the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        # Memory, not tensors: a tensor that is given other memory is not seen.
        addresses = tree_map_only(torch.Tensor, torch.Tensor.detach, (arguments, keywords or {}))
        self._calls.append((function, *addresses, result))
        return result

    def replay(self) -> None:
        for function, arguments, keywords, result in self._calls:
            result.copy_(function(*arguments, **keywords))


class Stream:
    """Writes down who waits for it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self.name = name

    def wait_stream(self, other: "Stream") -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self.name}")


@contextmanager
def pretended_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """While it lasts there is one GPU of 4 GiB; yields what happened on its streams."""
    log: list[str] = []
    current = [Stream(log, "main stream")]

    @contextmanager
    def stream(other: Stream) -> Iterator[None]:
        before, current[0] = current[0], other
        log.append(f"work goes to {other.name}")
        yield
        current[0] = before

    played = {
        "is_available": lambda: True,
        "synchronize": lambda *_: None,
        "mem_get_info": lambda: (4 * GIB, 4 * GIB),
        "memory_allocated": lambda: GIB,
        "max_memory_allocated": lambda: 3 * GIB,
        "reset_peak_memory_stats": lambda: None,
        "current_stream": lambda: current[0],
        "Stream": lambda: Stream(log, "side stream"),
        "stream": stream,
        "CUDAGraph": Graph,
        "graph": lambda graph: graph,
        "device_count": lambda: 1,
        "get_device_capability": lambda: (9, 0),
        "get_device_properties": lambda _: SimpleNamespace(name="Pretended", multi_processor_count=1),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0),
        "nccl": SimpleNamespace(version=lambda: (2, 29, 7)),
    }
    with monkeypatch.context() as patch, OnCpu():
        for name, value in played.items():
            patch.setattr(torch.cuda, name, value)
        yield log
