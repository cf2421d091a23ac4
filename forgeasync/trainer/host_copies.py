"""Copies between host and device, made concurrently with computation. Needs only torch."""

from collections.abc import Mapping

import numpy as np
import torch

from forgeasync.models import DEVICE_TYPE


def page_locked(values: np.ndarray) -> torch.Tensor:
    """Return an array in host memory that can be copied to a GPU without waiting for what runs there."""
    host = torch.from_numpy(values)
    return host if DEVICE_TYPE == "cpu" else host.pin_memory()


def to_device(values: np.ndarray) -> torch.Tensor:
    """Return an array on the device, without waiting for what runs there."""
    return page_locked(values).to(DEVICE_TYPE, non_blocking=True)


class HostCopies:
    """Copies named tensors to the host, concurrently with computation; every call has the same tensors.

    From a GPU they are copied on a separate stream, into page-locked memory that is reused for the next copy.
    Without a GPU every copy gets new memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.Stream | None = None

    def now(self) -> torch.Event | None:
        """Return the event that a copy has to wait for. Call it in the training thread."""
        if DEVICE_TYPE == "cpu":
            return None
        return torch.get_device_module(DEVICE_TYPE).current_stream().record_event()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor], after: torch.Event | None) -> dict[str, torch.Tensor]:
        """Return copies of the tensors as they are at ``after``; shards stay shards.

        Blocks until the copies are complete. The tensors must not change meanwhile. The tensors returned by
        the previous call are overwritten.
        """
        if after is None:
            return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        device = torch.get_device_module(DEVICE_TYPE)
        if self._stream is None:
            self._stream = device.Stream()
        with device.stream(self._stream):
            self._stream.wait_event(after)
            for name, tensor in tensors.items():
                self._buffer_for(name, tensor).copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return {name: self._buffers[name] for name in tensors}

    def _buffer_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return self._buffers[name]
