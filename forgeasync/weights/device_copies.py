"""Copies weights from a GPU into page-locked shared memory, on a stream of their own, beside training."""

from collections.abc import Sequence

import torch


def page_lock(buffer: torch.Tensor) -> None:
    """Let a GPU write to a host buffer without a copy through the driver's own memory; no-op without CUDA.

    The lock lasts as long as the process.

    Raises:
        ValueError: the operating system does not let this process lock that much memory.
    """
    if not torch.cuda.is_available() or not buffer.numel():
        return
    cudart = torch.cuda.cudart()
    error = cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(error) != 0:
        raise ValueError(
            f"{buffer.nbytes:,} bytes of shared memory cannot be page-locked (CUDA says "
            f"{cudart.cudaGetErrorString(error)}); raise the limit on locked memory (ulimit -l, or "
            "docker run --ulimit memlock=-1)"
        )


class StartedCopies:
    """Copies that a device has been given and may not have made yet."""

    def __init__(self, device: torch.device, done: torch.Event) -> None:
        self._device = device
        self._done = done

    def hold_stream(self) -> None:
        """Have all that the calling thread gives the device from now on wait for the copies.

        The host does not wait.
        """
        torch.get_device_module(self._device).current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        """Block until the copies are made; from any thread."""
        self._done.synchronize()


class DeviceCopies:
    """Copies shards of one device to the host, on a stream of its own."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None

    def start(self, targets: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> StartedCopies:
        """Start to copy each shard into its flat target on the host, cast to its dtype on the device.

        The copies wait for what the calling thread has given the device so far. The shards must not change
        before they are made: see ``StartedCopies.hold_stream``.
        """
        (device,) = {shard.device for shard in shards}
        module = torch.get_device_module(device)
        if self._stream is None:
            self._stream = module.Stream(device)
        self._stream.wait_event(module.current_stream(device).record_event())
        # Memory that is allocated here belongs to this stream: the allocator uses that of a freed cast only
        # for a later one of the same stream, which is computed after the first was copied. So no cast has to
        # be kept, and one at a time takes memory.
        with module.stream(self._stream):
            for target, shard in zip(targets, shards, strict=True):
                target.view(shard.shape).copy_(shard.to(target.dtype), non_blocking=True)
        # A thread that waits for this event sleeps instead of polling.
        done = module.Event(blocking=True)
        self._stream.record_event(done)
        return StartedCopies(device, done)
