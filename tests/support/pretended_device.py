"""Tensors that say they are on a GPU: what code does with them shows without one.

Their data are on the CPU. What only a CPU tensor can do, such as ``numpy()``, fails as on a real device.

Operations take effect at once. With a ``LazyGpu`` in use they only take effect when the test, or somebody who
waits, runs the stream that they were given to: whoever relies on an order without a wait shows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("cuda:0")

blocking_copies: list[torch.Size] = []
"""Shapes of the copies to the host that the host would have waited for."""


class LazyEvent:
    """All that a stream was given before."""

    def __init__(self, blocking: bool = False) -> None:
        self.is_blocking = blocking
        self.num_waits = 0
        """How often the host waited for it."""

    def record(self, stream: "LazyStream") -> "LazyEvent":
        self._stream, self._num_operations = stream, len(stream.operations)
        return self

    def reach(self) -> None:
        self._stream.run(self._num_operations)

    def synchronize(self) -> None:
        self.num_waits += 1
        self.reach()


class LazyStream:
    """Runs what it was given in order, and not before it must."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], None]] = []
        self._num_run = 0

    def record_event(self, event: LazyEvent | None = None) -> LazyEvent:
        return (LazyEvent() if event is None else event).record(self)

    def wait_event(self, event: LazyEvent) -> None:
        self.operations.append(event.reach)

    def run(self, num_operations: int | None = None) -> None:
        """Run the first so many operations, or all, as early as the events between them allow."""
        stop = len(self.operations) if num_operations is None else num_operations
        while self._num_run < stop:
            self._num_run += 1
            self.operations[self._num_run - 1]()

    synchronize = run


class LazyGpu:
    """Stands for ``torch.cuda``."""

    in_use: Optional["LazyGpu"] = None

    def __init__(self) -> None:
        self.compute = self._current = LazyStream()
        self.sides: list[LazyStream] = []
        self.events: list[LazyEvent] = []

    def Stream(self, device: torch.device = DEVICE) -> LazyStream:
        self.sides.append(LazyStream())
        return self.sides[-1]

    def Event(self, blocking: bool) -> LazyEvent:
        self.events.append(LazyEvent(blocking))
        return self.events[-1]

    def current_stream(self, device: torch.device = DEVICE) -> LazyStream:
        return self._current

    @contextmanager
    def stream(self, stream: LazyStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def give(self, function: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
        """Give the current stream an operation on CPU tensors; returns the tensor for its result."""
        schema = function._schema
        if any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments):
            self._current.operations.append(lambda: function(*arguments, **keywords))
            return arguments[0]
        result = function(*arguments, **keywords)
        if schema.returns[0].alias_info is None:
            # Its shape is known now, its values when it is computed.
            result = result.fill_(float("nan"))
            self._current.operations.append(lambda: result.copy_(function(*arguments, **keywords)))
        return result


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
        if LazyGpu.in_use is None:
            result = function(*on_cpu[0], **on_cpu[1])
        else:
            result = LazyGpu.in_use.give(function, *on_cpu)
        if goes_to_host:
            return result
        return tree_map_only(torch.Tensor, OnDevice, result)
