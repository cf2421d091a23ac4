"""Staging buffers of one trainer rank: two files in its host's shared memory, allocated once.

The trainer copies its shards into one buffer while generators may still read the other one; the ledger
decides which buffer it may write. A version is written in two parts. ``StagingBuffers.begin``, called by the
training thread, starts copies from the GPU. ``SlotWrite.finish``, called by another thread during training,
waits for them, copies shards that are on the host, and computes checksums and patches. Before the shards
change, the training thread calls ``SlotWrite.hold_stream``, and waits for the end of ``finish`` if shards are
on the host.

The files outlive the trainer's processes while the run's folder exists: ``StagedVersion`` reads a version
back if the trainer is gone.
"""

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from forgeasync.weights.layout import RankLayout, WeightLayout, whole_tensors
from forgeasync.weights.ledger import BLOCK_BYTES, NUM_SLOTS, Manifest, block_range, checksum
from forgeasync.weights.patches import PatchWriter, StagedContent
from forgeasync.weights.transports.transport import StagingSource


class SharedFile:
    """File in shared memory, mapped for writing. Its pages are allocated on the first write."""

    def __init__(self, path: Path, num_bytes: int, *, is_new: bool, reserve: bool = False) -> None:
        """Create or open the file; ``reserve`` allocates all of its pages at once.

        Raises:
            ValueError: The host does not have enough shared memory left.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if is_new else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if is_new:
                os.ftruncate(descriptor, max(1, num_bytes))
            if reserve and num_bytes:
                # Otherwise a full /dev/shm causes SIGBUS in the middle of a copy.
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
        """File contents as a uint8 tensor."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


def page_lock(buffer: torch.Tensor) -> None:
    """Page-lock a host buffer, so that a GPU writes to it directly; no-op without CUDA.

    The lock lasts as long as the process.

    Raises:
        ValueError: The operating system does not let this process lock that much memory.
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
    """Copies that were started on a device and may be incomplete."""

    def __init__(self, device: torch.device, done: torch.Event) -> None:
        self._device = device
        self._done = done

    def hold_stream(self) -> None:
        """Make the calling thread's later work on the device wait for the copies; the host does not wait."""
        torch.get_device_module(self._device).current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        """Block until the copies are complete; callable from any thread."""
        self._done.synchronize()


class DeviceCopies:
    """Copies shards of one device to the host on a separate stream, concurrently with training."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None

    def start(self, targets: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> StartedCopies | None:
        """Start to copy the shards on the device into their targets on the host; None if there are none.

        Shards are cast to the dtype of their targets on the device; a target may be flat. The copies wait for
        the work that the calling thread has already submitted to the device. The shards must not change
        before they are copied: see ``StartedCopies.hold_stream``. Shards on the host are left to the caller.
        """
        pairs = [pair for pair in zip(targets, shards, strict=True) if pair[1].device.type != "cpu"]
        if not pairs:
            return None
        (device,) = {shard.device for _, shard in pairs}
        module = torch.get_device_module(device)
        if self._stream is None:
            self._stream = module.Stream(device)
        self._stream.wait_event(module.current_stream(device).record_event())
        # Memory of a cast belongs to this stream: the allocator reuses it only for a later cast on the same
        # stream, which is computed after the first one was copied. So no cast has to be kept, and only one at
        # a time uses memory.
        with module.stream(self._stream):
            for target, shard in pairs:
                target.view(shard.shape).copy_(shard.to(target.dtype), non_blocking=True)
        # Blocking: a thread that waits for this event sleeps instead of polling.
        done = module.Event(blocking=True)
        self._stream.record_event(done)
        return StartedCopies(device, done)


def staging_file(folder: Path, rank: int, slot: int) -> Path:
    """Return the path of one of a rank's buffers."""
    return folder / f"weights-{rank}-{slot}"


class StagingBuffers:
    """Writes versions of one rank's shards to its staging buffers."""

    def __init__(self, folder: Path, layout: RankLayout, dtype: torch.dtype) -> None:
        """Allocate both buffers as files in ``folder``, page-locked if there is a GPU."""
        self._layout = layout
        self._copies = DeviceCopies()
        self._files = [
            SharedFile(
                staging_file(folder, layout.rank, slot), layout.buffer_bytes, is_new=True, reserve=True
            )
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
        self._contents: dict[int, StagedContent] = {}

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files of the buffers in shared memory, by slot."""
        return tuple(file.path for file in self._files)

    def bytes(self, slot: int) -> torch.Tensor:
        """Return a buffer as a uint8 tensor of its layout's length."""
        return self._files[slot].bytes[: self._layout.buffer_bytes]

    @torch.no_grad()
    def begin(self, slot: int, shards: Sequence[torch.Tensor]) -> "SlotWrite":
        """Begin to write the local ``shards`` (one per piece, cast if needed) into a buffer.

        Call it in the training thread.
        """
        targets = self._targets[slot]
        self._contents.pop(slot, None)
        copies = self._copies.start(targets, shards)
        return SlotWrite(self, slot, self._layout, targets, shards, copies)

    def blocks(self, slot: int) -> "StagedBlocks":
        """Return what describes the blocks of a buffer while a version is written into it.

        With patches, they are those from the version in the other buffer, if it has one.
        """
        buffer = self.bytes(slot).numpy()
        base = next((content for other, content in self._contents.items() if other != slot), None)
        patches = None
        if self._layout.patch_bytes and base is not None:
            patches = PatchWriter(self._layout, self._targets[slot][0].itemsize, buffer, base)
        return StagedBlocks(buffer, self._layout, patches)

    def complete(self, slot: int, content: StagedContent) -> None:
        """Record that a buffer has a whole version."""
        self._contents[slot] = content


class SlotWrite:
    """Version that is being written into a slot."""

    def __init__(
        self,
        buffers: StagingBuffers,
        slot: int,
        layout: RankLayout,
        targets: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        copies: StartedCopies | None,
    ) -> None:
        """``copies`` are those of the shards on a GPU; None if there are none."""
        self._buffers = buffers
        self._slot = slot
        self._layout = layout
        self._targets = targets
        self._shards = shards
        self._copies = copies

    @property
    def reads_host(self) -> bool:
        """Whether ``finish`` reads shards on the host, which must not change before it returns."""
        return any(shard.device.type == "cpu" for shard in self._shards)

    def hold_stream(self) -> None:
        """Make the calling thread's stream wait for the copies from the GPU, if there are any."""
        if self._copies is not None:
            self._copies.hold_stream()

    @torch.no_grad()
    def finish(self) -> StagedContent:
        """Wait until the slot has all shards; return them with the checksums and patches of their blocks.

        Call it in a thread other than the training thread.
        """
        if self._copies is not None:
            self._copies.wait()
        blocks = self._buffers.blocks(self._slot)
        for piece, target, source in zip(self._layout.pieces, self._targets, self._shards, strict=True):
            if source.device.type != "cpu":
                blocks.advance(piece.offset + target.nbytes)
                continue
            if target.nbytes <= BLOCK_BYTES or not source.is_contiguous():
                target.view(source.shape).copy_(source)
                blocks.advance(piece.offset + target.nbytes)
                continue
            for written in _copy_blocks(target, source.view(-1), piece.offset):
                # The block is still in the CPU's cache.
                blocks.advance(written)
        content = blocks.finish()
        self._buffers.complete(self._slot, content)
        return content


def _copy_blocks(target: torch.Tensor, source: torch.Tensor, offset: int) -> Iterator[int]:
    """Copy flat tensors block by block and yield after each block; ``target`` begins at ``offset``."""
    stop = offset + target.nbytes
    cuts = [offset, *range((offset // BLOCK_BYTES + 1) * BLOCK_BYTES, stop, BLOCK_BYTES), stop]
    if source.dtype == target.dtype:
        # Numpy, because slicing a tensor takes ten times as long as slicing an array.
        to, of = target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy()
        for first, last in pairwise(cuts):
            np.copyto(to[first - offset : last - offset], of[first - offset : last - offset])
            yield last
    else:
        for first, last in pairwise(cuts):
            elements = slice((first - offset) // target.itemsize, (last - offset) // target.itemsize)
            target[elements].copy_(source[elements])
            yield last


class StagedBlocks:
    """Checksums and patches of a version's blocks, made in order, as soon as each block is written."""

    def __init__(self, buffer: np.ndarray, layout: RankLayout, writer: PatchWriter | None) -> None:
        """Describe the weights in ``buffer`` (uint8); without ``writer`` there are no patches."""
        self._buffer = buffer
        self._num_bytes = layout.num_bytes
        self._writer = writer
        self._next, self._next_stop = 0, min(BLOCK_BYTES, layout.num_bytes)
        self._checksums = np.zeros(layout.num_blocks, np.uint64)

    def advance(self, written: int) -> None:
        """Record that everything before byte ``written`` is written."""
        while self._next_stop <= written and self._next < len(self._checksums):
            found = checksum(self._buffer[block_range(self._next, self._num_bytes)])
            self._checksums[self._next] = found
            if self._writer is not None:
                self._writer.add(self._next, found)
            self._next += 1
            self._next_stop = block_range(self._next, self._num_bytes).stop

    def finish(self) -> StagedContent:
        """Complete the patches, when all blocks are written."""
        patches = () if self._writer is None else self._writer.finish()
        return StagedContent(buffer=self._buffer, checksums=self._checksums, patches=patches)


class VersionUnreadable(OSError):
    """A staged version is missing, is on another host, or does not match its manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """Staged version with the addresses of its buffers."""

    manifest: Manifest
    layout: WeightLayout
    sources: tuple[StagingSource, ...]
    """Staging sources by trainer rank."""


class StagedVersion:
    """Reads one staged version as whole tensors."""

    def __init__(self, staged: StagedWeights) -> None:
        """Map the buffers of all ranks and check every block.

        Raises:
            VersionUnreadable: a buffer is not a file of this host, or a block has another checksum than the
                manifest says.
        """
        manifest, layout = staged.manifest, staged.layout
        self._layout = layout
        self._buffers = [
            _open(source.paths[manifest.slot], rank.num_bytes)
            for source, rank in zip(staged.sources, layout.ranks, strict=True)
        ]
        for rank, buffer, checksums in zip(layout.ranks, self._buffers, manifest.checksums, strict=True):
            for block, expected in enumerate(checksums.tolist()):
                if checksum(buffer.memory[block_range(block, rank.num_bytes)]) != expected:
                    raise VersionUnreadable(
                        f"block {block} of rank {rank.rank} is not that of version {manifest.version}"
                    )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return every tensor whole, with its name, one at a time."""
        images = [
            buffer.bytes[: rank.num_bytes].view(self._layout.dtype)
            for buffer, rank in zip(self._buffers, self._layout.ranks, strict=True)
        ]
        return whole_tensors(self._layout, images)


def _open(path: Path, num_bytes: int) -> SharedFile:
    try:
        return SharedFile(path, num_bytes, is_new=False)
    except (OSError, ValueError) as error:
        raise VersionUnreadable(f"{path} cannot be read: {error}") from error
