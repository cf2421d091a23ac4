"""Copies weights from a GPU into page-locked shared memory, with one wait for all of them."""

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


def start_copy(target: torch.Tensor, shard: torch.Tensor) -> None:
    """Start to copy a shard on a device into ``target`` on the host, cast on the device.

    Neither is there before ``finish_copies``. The cast copy is freed in the order of the device's stream.
    """
    target.view(shard.shape).copy_(shard.to(target.dtype), non_blocking=True)


def finish_copies(shards: Sequence[torch.Tensor]) -> None:
    """Wait for all copies that were started from the devices of these shards."""
    for device in {shard.device for shard in shards if shard.device.type != "cpu"}:
        torch.get_device_module(device).synchronize(device)
