"""Snapshots of one trainer rank in its host's shared memory, from which a restarted trainer continues.

A rank has two files and writes them in turn, so that the previous snapshot stays complete while the next one
is written. The files outlive the process. A file is a header of ``HEADER_BYTES``, then the tensors, each at a
multiple of ``ALIGNMENT`` bytes. The header has the version, the layout, a checksum of the body, and a
checksum of itself. It is invalidated before the first byte of a new snapshot is written, and written after
the last one. So if the process dies at any point, an incomplete file has no snapshot, and the rank's other
file has the previous one.
"""

import hashlib
import math
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from forgeasync.trainer.run_checkpoint import State
from forgeasync.weights import DeviceCopies, SharedFile, StartedCopies, local_shard, page_lock

NUM_SLOTS = 2
HEADER_BYTES = 4096
ALIGNMENT = 64
_MAGIC = b"forgesnp"
_FIELDS = struct.Struct("<8sqQQ16s")
"""Magic, version, bytes of the body, checksum of the body, digest of the layout."""
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Place of one tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """First byte in the file."""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLayout:
    """Places of all tensors of a rank, in order."""

    parts: tuple[Part, ...]
    num_bytes: int
    """Size of a file."""

    @property
    def digest(self) -> bytes:
        """16 bytes that depend on all names, dtypes, shapes and offsets."""
        text = repr([(part.name, str(part.dtype), part.shape, part.offset) for part in self.parts])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def lay_out(named: Sequence[tuple[str, torch.Tensor]]) -> SnapshotLayout:
    """Assign a place to every tensor (a rank's own shard), in the given order."""
    parts, offset = [], HEADER_BYTES
    for name, tensor in named:
        part = Part(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=offset)
        parts.append(part)
        offset += -(-part.num_bytes // ALIGNMENT) * ALIGNMENT
    return SnapshotLayout(parts=tuple(parts), num_bytes=offset)


def body_checksum(memory: memoryview) -> int:
    """Return the xxh3 checksum (64 bits) of everything after the header."""
    return xxhash.xxh3_64_intdigest(memory[HEADER_BYTES:])


def invalidate(memory: memoryview) -> None:
    """Mark a file as having no snapshot. Call it before its body is changed."""
    memory[: len(_MAGIC)] = bytes(len(_MAGIC))


def finish(memory: memoryview, *, version: int, digest: bytes) -> None:
    """Write the header after the body is complete: the file then has a snapshot of ``version``."""
    fields = _FIELDS.pack(_MAGIC, version, len(memory) - HEADER_BYTES, body_checksum(memory), digest)
    header = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    memory[: len(header)] = header


def read_version(memory: memoryview, *, digest: bytes) -> int | None:
    """Return the version of the snapshot in a file; None if it has no complete snapshot of this layout."""
    if len(memory) < HEADER_BYTES:
        return None
    fields = bytes(memory[: _FIELDS.size])
    (own,) = _CHECKSUM.unpack_from(memory, _FIELDS.size)
    magic, version, num_bytes, checksum, found = _FIELDS.unpack(fields)
    if magic != _MAGIC or own != xxhash.xxh3_64_intdigest(fields):
        return None
    if found != digest or num_bytes != len(memory) - HEADER_BYTES or checksum != body_checksum(memory):
        return None
    return int(version)


def slot_of(version: int, *, every_steps: int) -> int:
    """Return which of the two files a version is written to; versions are multiples of ``every_steps``."""
    return version // every_steps % 2


def newest_common(versions_by_rank: Sequence[Collection[int]], *, at_most: int) -> int | None:
    """Return the newest version, not after ``at_most``, of which every rank has a complete snapshot."""
    common = set.intersection(*map(set, versions_by_rank))
    return max((version for version in common if version <= at_most), default=None)


def local_parts(state: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return this rank's own part of every tensor, by name; the parts share memory."""
    return [(name, local_shard(tensor).detach()) for name, tensor in state.items()]


def snapshot_bytes(state: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of shared memory that the snapshots of this rank use."""
    return NUM_SLOTS * lay_out(local_parts(state)).num_bytes


class Snapshots:
    """Writes and reads the two snapshot files of this rank."""

    def __init__(self, folder: Path, state: State, *, every_steps: int) -> None:
        """Create the files in ``folder`` of this host, or open those of an earlier process.

        Snapshots are taken of versions that ``every_steps`` divides. ``state`` has the tensors of a snapshot.

        Raises:
            ValueError: The host does not have enough shared memory left.
        """
        self._every_steps = every_steps
        self._layout = lay_out(local_parts(state))
        self._digest = self._layout.digest
        paths = [folder / f"snapshot-{dist.get_rank()}-{slot}" for slot in range(NUM_SLOTS)]
        self._files = [
            SharedFile(path, self._layout.num_bytes, is_new=not path.exists(), reserve=True) for path in paths
        ]
        for file in self._files:
            page_lock(file.bytes)
        self._copies = DeviceCopies()
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._written: Future[None] | None = None
        self.newest: int | None = None
        """Version of the newest complete snapshot that this process wrote or continued from."""

    @torch.no_grad()
    def restore(self, state: State, *, at_most: int) -> int | None:
        """Fill ``state`` from the newest snapshot that all ranks have, not after ``at_most``; collective.

        Returns its version. If there is none, returns None and leaves ``state`` unchanged.
        """
        found = {
            version: file
            for file in self._files
            if (version := read_version(file.memory, digest=self._digest)) is not None
        }
        by_rank: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, sorted(found))
        version = newest_common(by_rank, at_most=at_most)
        if version is not None:
            for part, (_, tensor) in zip(self._layout.parts, local_parts(state), strict=True):
                tensor.copy_(_stored(found[version], part))
            self.newest = version
        return version

    @torch.no_grad()
    def roll_back(self, state: State) -> None:
        """Fill ``state`` from this rank's newest snapshot, which is complete.

        Raises:
            RuntimeError: The memory has changed since it was written.
        """
        assert self.newest is not None, "there is one"
        file = self._files[slot_of(self.newest, every_steps=self._every_steps)]
        found = read_version(file.memory, digest=self._digest)
        if found != self.newest:
            raise RuntimeError(f"the snapshot of version {self.newest} is damaged: its checksum is wrong")
        for part, (_, tensor) in zip(self._layout.parts, local_parts(state), strict=True):
            tensor.copy_(_stored(file, part))

    def begin_if_due(self, version: int, state: State) -> None:
        """Begin to write a snapshot if this version is due. Call it in the training thread.

        The tensors must not change before ``until_written`` has returned.
        """
        if version % self._every_steps:
            return
        self.until_written()
        file = self._files[slot_of(version, every_steps=self._every_steps)]
        targets = [_stored(file, part) for part in self._layout.parts]
        sources = [tensor for _, tensor in local_parts(state)]
        # If the process is killed after this line, the other file still has its snapshot.
        invalidate(file.memory)
        self._written = self._writing.submit(
            self._write, version, file, targets, sources, self._copies.start(targets, sources)
        )

    @torch.no_grad()
    def _write(
        self,
        version: int,
        file: SharedFile,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        copies: StartedCopies | None,
    ) -> None:
        for target, source in zip(targets, sources, strict=True):
            if source.device.type == "cpu":
                target.copy_(source)
        if copies is not None:
            copies.wait()
        finish(file.memory, version=version, digest=self._digest)
        self.newest = version

    def until_written(self) -> float:
        """Wait until the snapshot in progress is complete; return the seconds waited or raise its error."""
        start_s = time.perf_counter()
        if self._written is not None:
            self._written.result()
        return time.perf_counter() - start_s


def _stored(file: SharedFile, part: Part) -> torch.Tensor:
    """Return the tensor at a place in a file."""
    return file.bytes[part.offset : part.offset + part.num_bytes].view(part.dtype).view(part.shape)
