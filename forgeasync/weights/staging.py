"""Staging buffers of one trainer rank, and the ledger of who may write and read them.

There are two buffers (slots): files in the host's shared memory, allocated once. The trainer writes a version
into a slot without readers, if possible not into the slot of the newest version, while generators may still
read the other one. Readers lease the newest version while they copy it. If no slot is free, a version is
skipped and owed: it is published when a lease ends. A lease that outlives its deadline no longer counts; if
its reader is still copying, checksums reveal the changed bytes. ``WeightLedger`` decides this: a pure state
machine with time as an argument. ``WeightExchange`` adds waiting: ``until_owed`` returns once a publisher
that skipped a version can publish again, and ``lease`` waits for a version newer than the reader's. The
publisher never waits for a reader.

A version is written in two parts. ``StagingBuffers.begin``, called by the training thread, starts copies from
the GPU. ``SlotWrite.finish``, called by another thread during training, waits for them, copies shards that
are on the host, and computes checksums. Before the shards change, the training thread calls
``SlotWrite.hold_stream``, and waits for the end of ``finish`` if shards are on the host.

The files outlive the trainer's processes while the run's folder exists: ``StagedVersion`` reads a version
back if the trainer is gone.
"""

import asyncio
import errno
import mmap
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from forgeasync.waiting import Monitor
from forgeasync.weights.layout import (
    BLOCK_BYTES,
    Manifest,
    RankLayout,
    WeightLayout,
    block_range,
    checksum,
    whole_tensors,
)
from forgeasync.weights.transports.transport import StagingSource

NUM_SLOTS = 2
"""Number of staging buffers of every trainer rank."""


class SlotState(StrEnum):
    EMPTY = "empty"
    WRITING = "writing"
    COMMITTED = "committed"


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.EMPTY
    manifest: Manifest | None = None
    deadline_s_by_reader: dict[int, float] = field(default_factory=dict)


class WeightLedger:
    """State of the slots, of the versions in them and of their leases."""

    def __init__(self, *, lease_timeout_s: float) -> None:
        self._lease_timeout_s = lease_timeout_s
        self._slots = [_Slot() for _ in range(NUM_SLOTS)]
        self.is_owing = False
        """Whether a version was skipped or lost and none was published since."""
        self.num_skipped = 0
        self.num_expired_leases = 0

    def metrics(self) -> dict[str, float]:
        """Return counts since the run began, by their names in metrics.jsonl."""
        return {
            "weights/num_skipped_versions": self.num_skipped,
            "weights/num_expired_leases": self.num_expired_leases,
        }

    @property
    def newest(self) -> Manifest | None:
        """Newest readable version; None before the first one and while the only one is overwritten."""
        committed = [slot.manifest for slot in self._slots if slot.state is SlotState.COMMITTED]
        return max((m for m in committed if m is not None), key=lambda m: m.version, default=None)

    def can_begin(self, now_s: float) -> bool:
        """Return whether ``begin`` would return a slot."""
        self._expire(now_s)
        return any(self._is_free(slot) for slot in self._slots)

    def begin(self, now_s: float) -> int | None:
        """Choose the slot for the next version; None if no slot is free, so that the version is skipped."""
        self._expire(now_s)
        newest = self.newest
        free = [index for index, slot in enumerate(self._slots) if self._is_free(slot)]
        if not free:
            self.is_owing = True
            self.num_skipped += 1
            return None
        # Prefer a slot other than that of the newest version, which late readers may still lease.
        choice = min(free, key=lambda i: newest is not None and self._slots[i].manifest is newest)
        self._slots[choice] = _Slot(state=SlotState.WRITING)
        self.is_owing = False
        return choice

    def commit(self, manifest: Manifest) -> None:
        """Record that a version is complete in its slot."""
        slot = self._slots[manifest.slot]
        assert slot.state is SlotState.WRITING, f"slot {manifest.slot} is {slot.state}"
        slot.state, slot.manifest = SlotState.COMMITTED, manifest

    def abandon(self, slot: int) -> None:
        """Discard a version whose publisher failed half-way. Readers never see it."""
        assert self._slots[slot].state is SlotState.WRITING
        self._slots[slot] = _Slot()
        self.is_owing = True

    def forget_committed(self) -> None:
        """Record that the staging buffers are new and empty: no version can be read, and the newest is owed.

        Leases end. A slot that is being written keeps its state, because it is written to the new buffers.
        """
        for index, slot in enumerate(self._slots):
            if slot.state is SlotState.COMMITTED:
                self._slots[index] = _Slot()
                self.is_owing = True

    def acquire(
        self, reader: int, *, newer_than: int, now_s: float, preferred: int | None = None
    ) -> Manifest | None:
        """Lease the ``preferred`` version to a reader, or the newest one if no slot has it.

        Returns the version's manifest, or None if no version is newer than ``newer_than``.
        """
        readable = [slot.manifest for slot in self._slots if slot.state is SlotState.COMMITTED]
        manifest = next(
            (
                one
                for one in readable
                if one is not None and one.version == preferred and one.version > newer_than
            ),
            self.newest,
        )
        if manifest is None or manifest.version <= newer_than:
            return None
        self._slots[manifest.slot].deadline_s_by_reader[reader] = now_s + self._lease_timeout_s
        return manifest

    def release(self, reader: int) -> None:
        """End a reader's lease, if it has one, after its copy or its failure."""
        for slot in self._slots:
            slot.deadline_s_by_reader.pop(reader, None)

    def next_deadline_s(self) -> float | None:
        """Return the time at which the next lease expires; None without leases."""
        return min((s for slot in self._slots for s in slot.deadline_s_by_reader.values()), default=None)

    def _is_free(self, slot: _Slot) -> bool:
        return slot.state is not SlotState.WRITING and not slot.deadline_s_by_reader

    def _expire(self, now_s: float) -> None:
        for slot in self._slots:
            late = [reader for reader, end_s in slot.deadline_s_by_reader.items() if end_s <= now_s]
            for reader in late:
                del slot.deadline_s_by_reader[reader]
            self.num_expired_leases += len(late)


Stage = Callable[[int], Awaitable[Manifest]]
"""Copies the trainer's current weights into a slot."""


def _now_s() -> float:
    return asyncio.get_running_loop().time()


class WeightExchange(Monitor[WeightLedger]):
    """``WeightLedger`` that coroutines of one event loop share and wait for."""

    async def publish(self, stage: Stage) -> Manifest | None:
        """Stage and commit the weights.

        Returns None if every slot is in use: the version is skipped and owed.
        """
        slot = self.change(lambda ledger: ledger.begin(_now_s()))
        if slot is None:
            return None
        try:
            manifest = await stage(slot)
        except BaseException:
            self.change(lambda ledger: ledger.abandon(slot))
            raise
        self.change(lambda ledger: ledger.commit(manifest))
        return manifest

    async def until_owed(self) -> None:
        """Wait until a version was skipped that could be published now."""
        await self.until(
            lambda ledger: ledger.is_owing and ledger.can_begin(_now_s()),
            # No event signals that a lease has expired: check the clock.
            look_at_s=lambda ledger: ledger.next_deadline_s() if ledger.is_owing else None,
        )

    @asynccontextmanager
    async def lease(
        self, reader: int, *, newer_than: int, preferred: int | None = None
    ) -> AsyncIterator[Manifest]:
        """Wait for a version newer than ``newer_than``, and protect its slot from being overwritten.

        The version is the ``preferred`` one if a slot still has it, otherwise the newest.
        """
        manifest = await self.until(
            lambda ledger: ledger.acquire(reader, newer_than=newer_than, now_s=_now_s(), preferred=preferred)
        )
        try:
            yield manifest
        finally:
            self.change(lambda ledger: ledger.release(reader))


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
        """Return a buffer as a uint8 tensor of its layout's length."""
        return self._files[slot].bytes[: self._layout.num_bytes]

    @torch.no_grad()
    def begin(self, slot: int, shards: Sequence[torch.Tensor]) -> "SlotWrite":
        """Begin to write the local ``shards`` (one per piece, cast if needed) into a buffer.

        Call it in the training thread.
        """
        targets = self._targets[slot]
        copies = self._copies.start(targets, shards)
        return SlotWrite(self._layout, self._files[slot].memory, targets, shards, copies)


class SlotWrite:
    """Version that is being written into a slot."""

    def __init__(
        self,
        layout: RankLayout,
        memory: memoryview,
        targets: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        copies: StartedCopies | None,
    ) -> None:
        """``copies`` are those of the shards on a GPU; None if there are none."""
        self._layout = layout
        self._memory = memory
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
    def finish(self) -> np.ndarray:
        """Wait until the slot has all shards, and return the checksum of every block, uint64.

        Call it in a thread other than the training thread.
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
                # The block is still in the CPU's cache.
                sums.advance(written)
        return sums.values


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


class _Checksums:
    """Computes checksums of blocks in order, as soon as the blocks are written."""

    def __init__(self, memory: memoryview, layout: RankLayout) -> None:
        self._memory = memory
        self._num_bytes = layout.num_bytes
        self._next, self._next_stop = 0, min(BLOCK_BYTES, layout.num_bytes)
        self.values = np.zeros(layout.num_blocks, np.uint64)

    def advance(self, written: int) -> None:
        """Record that everything before byte ``written`` is written."""
        while self._next_stop <= written and self._next < len(self.values):
            self.values[self._next] = checksum(self._memory[block_range(self._next, self._num_bytes)])
            self._next += 1
            self._next_stop = block_range(self._next, self._num_bytes).stop


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
        """Yield every tensor whole, with its name, one at a time."""
        images = [
            buffer.bytes[: rank.num_bytes].view(self._layout.dtype)
            for buffer, rank in zip(self._buffers, self._layout.ranks, strict=True)
        ]
        for name, tensor in whole_tensors(self._layout, images):
            yield name, tensor.clone()


def _open(path: Path, num_bytes: int) -> SharedFile:
    try:
        return SharedFile(path, num_bytes, is_new=False)
    except (OSError, ValueError) as error:
        raise VersionUnreadable(f"{path} cannot be read: {error}") from error
