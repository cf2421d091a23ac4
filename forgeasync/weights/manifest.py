"""Description of a published version: its slot, and the checksum of each of its blocks. Needs no torch."""

from dataclasses import dataclass

import numpy as np
import xxhash

BLOCK_BYTES = 256 * 2**10
"""Bytes that one checksum covers: few enough to be still in the CPU's cache after they were copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedShard:
    """One rank's part of a version, copied into one of its staging buffers."""

    rank: int
    version: int
    checksums: np.ndarray
    """Checksum of every block, uint64."""
    staging_s: float
    """Seconds from the start of the copies until the shard was staged, while training continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a whole version, made after the version's last byte was staged."""

    version: int
    slot: int
    """Index of the staging buffer, of the two that every rank has."""
    layout_digest: str
    checksums: tuple[np.ndarray, ...]
    """Checksums of every rank's blocks, by rank."""
    waited_s: float
    """Seconds until training could continue, of the slowest rank: checking weights and starting copies."""
    staging_s: float
    """Seconds from the start of the copies until the version was staged, of the slowest rank."""


def checksum(block: memoryview | np.ndarray) -> int:
    """Return the xxh3 checksum (64 bits) of a block of at most ``BLOCK_BYTES``. Faster than a copy."""
    # numpy declares the buffer protocol from Python 3.12 on.
    return xxhash.xxh3_64_intdigest(block)  # type: ignore[arg-type]


def block_range(block: int, num_bytes: int) -> slice:
    """Return the bytes of a block in a buffer of ``num_bytes``; the last one may be shorter."""
    return slice(block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, num_bytes))
