"""The staging buffers of one trainer rank: two files in its host's shared memory, allocated once.

The trainer copies its shards into one of them while generators may still read the other. Which one it may
write into is the ledger's decision.

A version is written in two parts. ``StagingBuffers.begin``, called by the thread that trains, gives the GPU
its copies. ``SlotWrite.finish``, called by another thread while training goes on, waits for them, copies
shards that lie on the host and computes checksums. Before the shards change, the thread that trains calls
``SlotWrite.hold_stream``, and waits for the end of ``finish`` if shards lie on the host.
"""

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from forgeasync.weights.device_copies import DeviceCopies, StartedCopies, page_lock
from forgeasync.weights.layout import RankLayout
from forgeasync.weights.ledger import NUM_SLOTS
from forgeasync.weights.manifest import BLOCK_BYTES, block_range, checksum


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
                f"weights need {num_bytes:,} bytes of shared memory, more than is left in {path.parent}; "
                "give the machine more (docker run --shm-size=...)"
            ) from error
        finally:
            os.close(descriptor)
        self.path = path

    @property
    def bytes(self) -> torch.Tensor:
        """The file as a uint8 tensor."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


def staging_file(folder: Path, rank: int, slot: int) -> Path:
    """Return the file of one of a rank's buffers in its folder."""
    return folder / f"weights-{rank}-{slot}"


class StagingBuffers:
    """Writes versions of one rank's shards."""

    def __init__(self, folder: Path, layout: RankLayout, dtype: torch.dtype) -> None:
        """Allocate both buffers as files in ``folder``, page-locked where there is a GPU to copy from."""
        self._layout = layout
        self._copies = DeviceCopies()
        self._files = [
            SharedFile(staging_file(folder, layout.rank, slot), layout.num_bytes, is_new=True, reserve=True)
            for slot in range(NUM_SLOTS)
        ]
        for slot in range(NUM_SLOTS):
            page_lock(self.bytes(slot))
        self._targets = [
            [
                self.bytes(slot)[piece.offset :][: piece.num_elements * dtype.itemsize].view(dtype)
                for piece in layout.pieces
            ]
            for slot in range(NUM_SLOTS)
        ]

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self._files)

    def bytes(self, slot: int) -> torch.Tensor:
        """A buffer as a uint8 tensor of its layout's length."""
        return self._files[slot].bytes[: self._layout.num_bytes]

    @torch.no_grad()
    def begin(self, slot: int, shards: Sequence[torch.Tensor]) -> "SlotWrite":
        """Begin to write the local ``shards`` (one per piece, cast on the way) into a buffer.

        To be called by the thread that trains.
        """
        targets = self._targets[slot]
        on_device = [
            (target, shard)
            for target, shard in zip(targets, shards, strict=True)
            if shard.device.type != "cpu"
        ]
        copies = None
        if on_device:
            device_targets, device_shards = zip(*on_device, strict=True)
            copies = self._copies.start(device_targets, device_shards)
        return SlotWrite(self._layout, self._files[slot].memory, targets, shards, copies)


class SlotWrite:
    """A version on its way into a slot."""

    def __init__(
        self,
        layout: RankLayout,
        memory: memoryview,
        targets: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        copies: StartedCopies | None,
    ) -> None:
        """``copies`` are those of the shards that lie on a GPU; None: none does."""
        self._layout = layout
        self._memory = memory
        self._targets = targets
        self._shards = shards
        self._copies = copies

    @property
    def reads_host(self) -> bool:
        """Whether ``finish`` reads shards, so that they must not change before it has returned."""
        return any(shard.device.type == "cpu" for shard in self._shards)

    def hold_stream(self) -> None:
        """Have the calling thread's stream wait for the copies from the GPU, if there are any."""
        if self._copies is not None:
            self._copies.hold_stream()

    @torch.no_grad()
    def finish(self) -> np.ndarray:
        """Return the checksum of every block, uint64, once the slot holds all shards.

        Blocks: it is meant for another thread than the one that trains.
        """
        if self._copies is not None:
            self._copies.wait()
        sums = _Checksums(self._memory, self._layout)
        for piece, target, source in zip(self._layout.pieces, self._targets, self._shards, strict=True):
            if source.device.type != "cpu":
                sums.advance(piece.offset + target.nbytes)
                continue
            if target.nbytes <= BLOCK_BYTES or not source.is_contiguous():
                target.view(source.shape).copy_(source)
                sums.advance(piece.offset + target.nbytes)
                continue
            for written in _copy_blocks(target, source.view(-1), piece.offset):
                # While the block is still in the cache.
                sums.advance(written)
        return sums.values


def _copy_blocks(target: torch.Tensor, source: torch.Tensor, offset: int) -> Iterator[int]:
    """Copy flat tensors block by block and yield after each block; ``target`` begins at ``offset``."""
    stop = offset + target.nbytes
    cuts = [offset, *range((offset // BLOCK_BYTES + 1) * BLOCK_BYTES, stop, BLOCK_BYTES), stop]
    if source.dtype == target.dtype:
        # Numpy bytes, because slicing a tensor takes ten times as long as slicing an array.
        to, of = target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy()
        for first, last in pairwise(cuts):
            np.copyto(to[first - offset : last - offset], of[first - offset : last - offset])
            yield last
    else:
        for first, last in pairwise(cuts):
            elements = slice((first - offset) // target.itemsize, (last - offset) // target.itemsize)
            target[elements].copy_(source[elements])
            yield last


class _Checksums:
    """Computes checksums of blocks in order, as soon as they are written."""

    def __init__(self, memory: memoryview, layout: RankLayout) -> None:
        self._memory = memory
        self._num_bytes = layout.num_bytes
        self._next, self._next_stop = 0, min(BLOCK_BYTES, layout.num_bytes)
        self.values = np.zeros(layout.num_blocks, np.uint64)

    def advance(self, written: int) -> None:
        """Note that everything before byte ``written`` is there."""
        while self._next_stop <= written and self._next < len(self.values):
            self.values[self._next] = checksum(self._memory[block_range(self._next, self._num_bytes)])
            self._next += 1
            self._next_stop = block_range(self._next, self._num_bytes).stop
