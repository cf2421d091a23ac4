"""How a snapshot of a rank's state lies in a file of shared memory, and which one all ranks can go on from.

A file is a header of ``HEADER_BYTES`` and behind it the tensors, each at a multiple of ``ALIGNMENT`` bytes.
The header says what is behind it (version, layout, checksum of all bytes) and is checked by a checksum of its
own. It is made invalid before the first byte of a new snapshot is written, and written after the last one: a
file that is cut off at any byte has no snapshot, and the rank's other file still has the one before.
"""

import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import xxhash

HEADER_BYTES = 4096
ALIGNMENT = 64
_MAGIC = b"forgesnp"
_FIELDS = struct.Struct("<8sqQQ16s")
"""Magic, version, bytes of the body, checksum of the body, digest of the layout."""
_CHECKSUM = struct.Struct("<Q")


class NoCommonSnapshot(RuntimeError):
    """The ranks have no snapshot of the same version that the run can go on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The place of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Byte of the file at which it begins."""

    @property
    def num_bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLayout:
    """The places of all tensors of a rank, in order."""

    parts: tuple[Part, ...]
    num_bytes: int
    """Size of a file."""

    @property
    def digest(self) -> bytes:
        """16 bytes that differ where names, dtypes, shapes or places differ."""
        text = repr([(part.name, str(part.dtype), part.shape, part.offset) for part in self.parts])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def lay_out(named: Sequence[tuple[str, torch.Tensor]]) -> SnapshotLayout:
    """Give every tensor (a rank's own shard) its place, in the order given."""
    parts, offset = [], HEADER_BYTES
    for name, tensor in named:
        part = Part(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=offset)
        parts.append(part)
        offset += -(-part.num_bytes // ALIGNMENT) * ALIGNMENT
    return SnapshotLayout(parts=tuple(parts), num_bytes=offset)


def body_checksum(memory: memoryview) -> int:
    """The xxh3 checksum (64 bits) of everything behind the header."""
    return xxhash.xxh3_64_intdigest(memory[HEADER_BYTES:])


def invalidate(memory: memoryview) -> None:
    """Say that the file has no snapshot; to be called before its body is changed."""
    memory[: len(_MAGIC)] = bytes(len(_MAGIC))


def finish(memory: memoryview, *, version: int, digest: bytes) -> None:
    """Write the header of a body that is complete: the file has a snapshot of ``version`` from now on."""
    fields = _FIELDS.pack(_MAGIC, version, len(memory) - HEADER_BYTES, body_checksum(memory), digest)
    header = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    memory[: len(header)] = header


def read_version(memory: memoryview, *, digest: bytes) -> int | None:
    """The version of the whole snapshot in a file; None if there is none of this layout."""
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
    """Which of the two files a version is written to; versions are multiples of ``every_steps``."""
    return version // every_steps % 2


def newest_common(versions_by_rank: Sequence[Collection[int]], *, at_most: int) -> int | None:
    """The newest version, not after ``at_most``, of which every rank has a whole snapshot."""
    common = set.intersection(*map(set, versions_by_rank))
    return max((version for version in common if version <= at_most), default=None)
