"""Patches: the elements that differ between two versions of a rank's weights, bit for bit. Needs no torch.

After an optimizer step nearly all bfloat16 weights have the bits that they had before, so a patch is much
smaller than a version. It has a part for each block that differs (``encode``). A block has no part if more
than a quarter of its elements differ, or if no room is left; generators then fetch the block itself.

A staging buffer has its patches behind its weights. The first one leads from the version in the other buffer
to this one. The patches of the other buffer follow, as many as fit. A generator with an older version applies
several of them, oldest first, and then compares each block with the manifest's checksum. Versions are
identified by the digest of their checksums, because a resumed run uses version numbers again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from forgeasync.weights.layout import RankLayout
from forgeasync.weights.ledger import NO_PART, Patch, block_range

MAX_PATCHES = 32
"""Most patches in a buffer: as many versions as rollouts may be old."""

_MAX_SHARE = 0.25
_MAX_DISTANCE = 255
_IS_WHOLE = -128


def digest_of(checksums: np.ndarray) -> int:
    """Return the digest of one rank's part of a version, by its blocks' checksums."""
    return xxhash.xxh3_64_intdigest(checksums.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedContent:
    """A complete version in a staging buffer."""

    buffer: np.ndarray
    """All bytes of the buffer, uint8."""
    checksums: np.ndarray
    """Checksum of every block, uint64."""
    patches: tuple[Patch, ...]
    """Patches from older versions, newest first."""


class PatchWriter:
    """Writes the patches of a version behind it, block by block, while the version is staged."""

    def __init__(self, layout: RankLayout, itemsize: int, buffer: np.ndarray, base: StagedContent) -> None:
        """``base`` is the version in another buffer, which must not change meanwhile."""
        self._layout = layout
        self._unit = np.dtype(f"u{itemsize}")
        self._buffer = buffer
        self._base = base
        self._end = layout.patch_start
        self._sizes = np.zeros(layout.num_blocks, np.uint32)

    def add(self, block: int, checksum: int) -> None:
        """Write the part of a block, which has been staged. Call it for all blocks in order."""
        if self._base.checksums[block] == checksum:
            return
        where = block_range(block, self._layout.num_bytes)
        part = encode(self._base.buffer[where].view(self._unit), self._buffer[where].view(self._unit))
        if part is not None and self._has_room(len(part)):
            self._append(part)
            self._sizes[block] = len(part)
        else:
            self._sizes[block] = NO_PART

    def finish(self) -> tuple[Patch, ...]:
        """Append the patches of the base, as many as fit. Returns all patches of the buffer, newest first."""
        base_digest = digest_of(self._base.checksums)
        patches = [Patch(base=base_digest, start=self._layout.patch_start, sizes=self._sizes)]
        for patch in self._base.patches[: MAX_PATCHES - 1]:
            parts = self._base.buffer[patch.start : int(patch.bounds()[-1])]
            if not self._has_room(len(parts)):
                break
            patches.append(replace(patch, start=self._end))
            self._append(parts)
        return tuple(patches)

    def _has_room(self, num_bytes: int) -> bool:
        return self._end + num_bytes <= self._layout.buffer_bytes

    def _append(self, part: np.ndarray) -> None:
        self._buffer[self._end : self._end + len(part)] = part
        self._end += len(part)


def encode(old: np.ndarray, new: np.ndarray) -> np.ndarray | None:
    """Return the part (uint8) that makes the elements ``old`` (unsigned) ``new``; None if too many differ.

    A part has the number n of its entries (uint32); the n distances of each entry's element from the one
    before it (uint8); n differences of the elements' bits, as integers (int8); and the new bits of elements
    whose difference is ``_IS_WHOLE`` because it does not fit. A distance above 255 takes several entries, all
    but the last with difference 0. Most changes move an element to the next number of its dtype.
    """
    places = np.flatnonzero(old != new)
    if not 0 < len(places) <= _MAX_SHARE * len(old):
        return None
    signed = np.dtype(f"i{old.itemsize}")
    differences = (new[places] - old[places]).view(signed)
    is_whole = (differences <= _IS_WHOLE) | (differences > -_IS_WHOLE - 1)
    distances = np.diff(places, prepend=0)
    num_before = np.maximum(distances - 1, 0) // _MAX_DISTANCE
    at = np.cumsum(num_before + 1) - 1
    all_distances = np.full(at[-1] + 1, _MAX_DISTANCE, np.uint8)
    all_distances[at] = distances - _MAX_DISTANCE * num_before
    all_differences = np.zeros(at[-1] + 1, np.int8)
    all_differences[at] = np.where(is_whole, _IS_WHOLE, differences)
    count = np.array([at[-1] + 1], np.uint32)
    parts = (count, all_distances, all_differences, new[places[is_whole]])
    return np.concatenate([part.view(np.uint8) for part in parts])


def apply(part: np.ndarray, block: np.ndarray) -> bool:
    """Change the elements of a block (unsigned) as a part says. Returns False if the part is damaged."""
    if not len(part):
        return True
    data = part.tobytes()
    count = int(np.frombuffer(data, np.uint32, 1)[0]) if len(data) >= 4 else len(data)
    if len(data) < 4 + 2 * count:
        return False
    places = np.cumsum(np.frombuffer(data, np.uint8, count, 4), dtype=np.int64)
    differences = np.frombuffer(data, np.int8, count, 4 + count)
    is_whole = differences == _IS_WHOLE
    whole = data[4 + 2 * count :]
    if not count or places[-1] >= len(block) or len(whole) != is_whole.sum() * block.itemsize:
        return False
    block[places] += differences.astype(f"i{block.itemsize}").view(block.dtype)
    block[places[is_whole]] = np.frombuffer(whole, block.dtype)
    return True


class PatchPlan:
    """Which parts bring blocks of a receive buffer to a version."""

    def __init__(self, patches: Sequence[Patch], wanted: np.ndarray, held_of: np.ndarray) -> None:
        """Plan for the ``wanted`` blocks (bool), with bytes of the versions whose digests are ``held_of``."""
        self._bounds = [patch.bounds() for patch in patches]
        self._num_steps = np.zeros(len(wanted), np.int64)
        can_step = wanted.copy()
        for index, patch in enumerate(patches):
            can_step &= patch.sizes != NO_PART
            is_base = held_of == np.uint64(patch.base)
            self._num_steps[can_step & is_base & (self._num_steps == 0)] = index + 1

    @property
    def blocks(self) -> np.ndarray:
        """Blocks that patches bring to the version (bool)."""
        return self._num_steps > 0

    def needs(self, unit_bytes: int, num_units: int) -> np.ndarray:
        """Return which units of the buffer, of ``unit_bytes``, have parts that the plan uses (bool)."""
        edges = np.zeros(num_units + 1, np.int64)
        for index, bounds in enumerate(self._bounds):
            used = (self._num_steps > index) & (np.diff(bounds) > 0)
            np.add.at(edges, bounds[:-1][used] // unit_bytes, 1)
            np.add.at(edges, (bounds[1:][used] - 1) // unit_bytes + 1, -1)
        return np.cumsum(edges)[:-1] > 0

    def apply(self, block: int, buffer: np.ndarray, elements: np.ndarray) -> bool:
        """Apply the parts of a block to its ``elements`` (unsigned), oldest first.

        ``buffer`` (uint8) has the parts where they were staged. Returns False if they are damaged.
        """
        return all(
            apply(buffer[bounds[block] : bounds[block + 1]], elements)
            for bounds in reversed(self._bounds[: self._num_steps[block]])
        )
