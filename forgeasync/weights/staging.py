"""The staging buffers of one trainer rank: two files in its host's shared memory, allocated once.

The trainer copies its shards into one of them while generators may still read the other. Which one it may
write into is the ledger's decision; nothing here waits.
"""

import errno
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from forgeasync.weights.layout import BLOCK_BYTES, RankLayout
from forgeasync.weights.manifest import StagedShard, block_range, checksum

NUM_SLOTS = 2


class SharedFile:
    """A file in shared memory, mapped for writing; its pages are allocated when they are first written."""

    def __init__(self, path: Path, num_bytes: int, *, is_new: bool, reserve: bool = False) -> None:
        """Make or open the file; ``reserve`` allocates all of its pages now.

        Raises:
            ValueError: the host has not that much shared memory left.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if is_new else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if is_new:
                os.ftruncate(descriptor, max(1, num_bytes))
            if reserve and num_bytes:
                # Without this a full /dev/shm shows as SIGBUS in the middle of a copy.
                os.posix_fallocate(descriptor, 0, num_bytes)
            self.memory = memoryview(mmap.mmap(descriptor, max(1, num_bytes), flags=mmap.MAP_SHARED))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG):
                raise
            raise ValueError(
                f"weights ask for {num_bytes:,} bytes of shared memory, more than is left of {path.parent}; "
                "give the machine more (docker run --shm-size=...)"
            ) from error
        finally:
            os.close(descriptor)
        self.path = path

    @property
    def bytes(self) -> torch.Tensor:
        """The file as a uint8 tensor."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


class StagingBuffers:
    """Writes versions of one rank's shards."""

    def __init__(self, folder: Path, layout: RankLayout, dtype: torch.dtype) -> None:
        """Allocate both buffers as files in ``folder``."""
        self._layout = layout
        self._dtype = dtype
        self._files = [
            SharedFile(folder / f"weights-{layout.rank}-{slot}", layout.num_bytes, is_new=True, reserve=True)
            for slot in range(NUM_SLOTS)
        ]

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self._files)

    def bytes(self, slot: int) -> torch.Tensor:
        """A buffer as a uint8 tensor of its layout's length."""
        return self._files[slot].bytes[: self._layout.num_bytes]

    @torch.no_grad()
    def write(self, slot: int, version: int, shards: Sequence[torch.Tensor]) -> StagedShard:
        """Copy the local ``shards`` (one per piece, cast on the way) into a buffer."""
        start_s = time.perf_counter()
        buffer = self.bytes(slot)
        sums = _Checksums(self._files[slot].memory, self._layout)
        itemsize = self._dtype.itemsize
        for piece, shard in zip(self._layout.pieces, shards, strict=True):
            stop = piece.offset + piece.num_elements * itemsize
            target = buffer[piece.offset : stop].view(self._dtype)
            source = shard.detach().to(self._dtype) if shard.device.type != "cpu" else shard.detach()
            if not source.is_contiguous():
                target.view(source.shape).copy_(source)
                sums.advance(stop)
                continue
            source = source.view(-1)
            step = BLOCK_BYTES // itemsize
            for first in range(0, len(source), step):
                last = min(first + step, len(source))
                target[first:last].copy_(source[first:last])
                # While the block is still in the cache.
                sums.advance(piece.offset + last * itemsize)
        sums.advance(self._layout.num_bytes, is_end=True)
        return StagedShard(
            rank=self._layout.rank,
            version=version,
            checksums=sums.values,
            copy_s=time.perf_counter() - start_s,
        )


class _Checksums:
    """Sums up blocks in order, as soon as they are written."""

    def __init__(self, memory: memoryview, layout: RankLayout) -> None:
        self._memory = memory
        self._num_bytes = layout.num_bytes
        self._next = 0
        self.values = np.zeros(layout.num_blocks, np.uint64)

    def advance(self, written: int, *, is_end: bool = False) -> None:
        """Everything before byte ``written`` is there."""
        while self._next < len(self.values):
            block = block_range(self._next, self._num_bytes)
            if block.stop > written or (not is_end and block.stop == self._num_bytes):
                return
            self.values[self._next] = checksum(self._memory[block])
            self._next += 1
