"""The next version of one GPU worker's weights: filled beside decoding, copied in between two steps.

The shadow has every parameter in the order of its kernel. On the host it is page-locked and shared by the
workers of equal rank of all generators there, each of which fills a part. On the device each worker has its
own. The swap copies, so that parameters stay where captured CUDA graphs expect them.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from forgeasync.config import ShadowMemory
from forgeasync.generator.host_memory import HostMemory
from forgeasync.weights import ALIGNMENT, HostShare, SharedFile, StridedCopy, page_lock


class GpuWeights:
    """The parameters of one worker's model, on any device, and their shadow."""

    def __init__(self, model: torch.nn.Module, *, worker_rank: int) -> None:
        self._parameters = {name: parameter.data for name, parameter in model.named_parameters()}
        self._worker_rank = worker_rank
        self._copies: dict[str, list[StridedCopy]] = {}
        self._shadow: _HostShadow | _DeviceShadow | None = None

    def plan(self, copies: Iterable[StridedCopy], host_memory: HostMemory) -> None:
        """Plan the copies of every version; parameters that nothing is copied to never change."""
        self._copies = {}
        for copy in copies:
            self._copies.setdefault(copy.parameter, []).append(copy)
        changing = {name: self._parameters[name] for name in self._copies}
        if host_memory.shadow is ShadowMemory.DEVICE:
            self._shadow = _DeviceShadow(changing, self._partly_filled())
        else:
            self._shadow = _HostShadow(changing, host_memory, self._worker_rank)

    def _partly_filled(self) -> set[str]:
        """Parameters with elements that no copy fills, such as the padding of a vocabulary."""
        return {
            name
            for name, copies in self._copies.items()
            if sum(copy.num_elements for copy in copies) < self._parameters[name].numel()
        }

    def take_share(self, share: HostShare) -> None:
        """Fill another part of the shadow from now on."""
        assert self._shadow is not None, "plan first"
        self._shadow.take_share(share)

    @torch.no_grad()
    def stage(self, images: Sequence[torch.Tensor]) -> None:
        """Fill this worker's part of the shadow from the receive buffer's images, while the model runs."""
        assert self._shadow is not None, "plan first"
        for name in self._shadow.own:
            target = self._shadow.begin(name)
            for copy in self._copies[name]:
                copy.target(target).copy_(copy.source(images[copy.rank]))
            self._shadow.end(name)

    @torch.no_grad()
    def swap(self) -> None:
        """Copy the shadow into the parameters; nothing may run the model meanwhile."""
        assert self._shadow is not None, "plan first"
        for name in self._copies:
            self._parameters[name].copy_(self._shadow.whole(name), non_blocking=True)
        # The host's part may be written over as soon as this returns.
        _synchronize(self._parameters.values())


class _HostShadow:
    """A file in shared memory of the host, page-locked; it holds whole parameters one after the other."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], host_memory: HostMemory, worker_rank: int
    ) -> None:
        starts, end = {}, 0
        for name, parameter in parameters.items():
            starts[name] = end
            end += -(-_span(parameter) * parameter.itemsize // ALIGNMENT) * ALIGNMENT
        makes_files = host_memory.makes_files
        file = SharedFile(host_memory.shadow_file(worker_rank), end, is_new=makes_files, reserve=makes_files)
        page_lock(file.bytes)
        self._views = {
            name: _like(parameter, file.bytes[starts[name] :]) for name, parameter in parameters.items()
        }
        self._sizes = {name: parameter.nbytes for name, parameter in parameters.items()}
        self.own = host_memory.share.of_sizes(self._sizes)
        if not host_memory.is_joining:
            # What no copy fills stays as it was loaded.
            for name in self.own:
                self._views[name].copy_(parameters[name])

    def take_share(self, share: HostShare) -> None:
        self.own = share.of_sizes(self._sizes)

    def begin(self, name: str) -> torch.Tensor:
        return self._views[name]

    def end(self, name: str) -> None:
        """Do nothing: the swap reads what was written."""

    def whole(self, name: str) -> torch.Tensor:
        return self._views[name]


class _DeviceShadow:
    """Memory of the worker's own device; each parameter is put together on the host first."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], partly_filled: set[str]) -> None:
        self._shadows = {name: parameter.clone() for name, parameter in parameters.items()}
        self._partly_filled = partly_filled
        self.own = list(parameters)
        largest = max((_span(parameter) * parameter.itemsize for parameter in parameters.values()), default=0)
        self._scratch = torch.empty(largest, dtype=torch.uint8)
        page_lock(self._scratch)
        devices = {parameter.device for parameter in parameters.values()}
        self._streams = {device: torch.Stream(device) for device in devices if device.type != "cpu"}

    def take_share(self, share: HostShare) -> None:
        """Do nothing: each worker fills all of its own."""

    def begin(self, name: str) -> torch.Tensor:
        shadow = self._shadows[name]
        target = _like(shadow, self._scratch)
        if name in self._partly_filled:
            target.copy_(shadow)
        return target

    def end(self, name: str) -> None:
        """Send a parameter on a stream of its own, so that decoding goes on, and wait for it."""
        shadow = self._shadows[name]
        source = _like(shadow, self._scratch)
        if shadow.device.type == "cpu":
            shadow.copy_(source)
            return
        stream = self._streams[shadow.device]
        with stream:
            shadow.copy_(source, non_blocking=True)
        stream.synchronize()

    def whole(self, name: str) -> torch.Tensor:
        return self._shadows[name]


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A view of the first bytes of ``memory`` (uint8) with the dtype, shape and strides of ``tensor``."""
    num_bytes = _span(tensor) * tensor.itemsize
    return memory[:num_bytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _synchronize(tensors: Iterable[torch.Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.get_device_module(device).synchronize(device)
