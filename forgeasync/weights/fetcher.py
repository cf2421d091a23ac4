"""Fetches versions from the trainer ranks' staging buffers into a host's own memory and checks them.

The receive buffer holds an image of each rank's staging buffer. A host has one receive buffer for all of its
generators, and each generator fetches its share of every version. Only ``WeightFetcher`` writes the buffer,
so checked blocks do not change. A block counts as held once its checksum equals the manifest's.

With ``weights.delta: exact`` a block that has the bytes of an older version becomes the new one by patches
(``weights.patches``), if these are fewer bytes and their result has the manifest's checksum. Otherwise the
block is fetched.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forgeasync.weights.layout import SEGMENT_BYTES, RankLayout, WeightLayout
from forgeasync.weights.ledger import BLOCK_BYTES, Manifest, Patch, block_range, checksum
from forgeasync.weights.patches import PatchPlan, digest_of
from forgeasync.weights.staging import SharedFile
from forgeasync.weights.transports.transport import ByteRange, Transport

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Maximum number of attempts to fetch blocks that did not arrive, or not with the manifest's checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """Position of one generator among those of its host, which fetch every version together."""

    index: int = 0
    count: int = 1

    def of_blocks(self, rank: RankLayout, granularity: int) -> np.ndarray:
        """Return the blocks (bool) of a rank's staging buffer that this generator fetches.

        Stripes of a segment are assigned in turn, starting with another generator for each rank, so that all
        generators read from all ranks at once.
        """
        blocks_per_stripe = granularity * max(1, SEGMENT_BYTES // granularity) // BLOCK_BYTES
        stripes = np.arange(rank.num_blocks) // blocks_per_stripe
        return (stripes + rank.rank) % self.count == self.index

    def of_sizes(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the names assigned to this generator.

        Large ones are assigned first, each to the generator with the least so far. Every generator of the
        host must pass the same sizes.
        """
        load = [0] * self.count
        own = []
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            least = min(range(self.count), key=load.__getitem__)
            load[least] += sizes[name]
            if least == self.index:
                own.append(name)
        return own


ALONE = HostShare()
"""Share of the only generator of a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReport:
    """Report of one fetch of a version, by one generator or by all generators of a host."""

    version: int
    is_complete: bool
    """Whether every block has the manifest's checksum; otherwise the old weights stay in use."""
    num_bytes_moved: int
    num_bytes_needed: int
    """Bytes that the engine needs: the minimum for a fetch without delta."""
    num_bad_blocks: int
    fetch_s: float
    failure: str | None = None
    """How the connection to a trainer rank failed last, if it did."""


def merge_host_reports(shares: Sequence[FetchReport]) -> FetchReport:
    """Combine the reports of a host's generators, which all need the same bytes of a version."""
    return FetchReport(
        version=shares[0].version,
        is_complete=all(share.is_complete for share in shares),
        num_bytes_moved=sum(share.num_bytes_moved for share in shares),
        num_bytes_needed=shares[0].num_bytes_needed,
        num_bad_blocks=sum(share.num_bad_blocks for share in shares),
        fetch_s=max(share.fetch_s for share in shares),
        failure=next((share.failure for share in shares if share.failure is not None), None),
    )


class ReceiveBuffer:
    """Memory of a host for fetched weights: one file in shared memory that all of its workers read."""

    def __init__(self, path: Path, layout: WeightLayout, *, is_new: bool = True) -> None:
        """Create or open the file. Pages of bytes that are never fetched are never allocated."""
        self.path = path
        num_bytes = _image_starts(layout)[-1]
        self._images = _images(SharedFile(path, num_bytes, is_new=is_new), layout)

    def image(self, rank: int) -> torch.Tensor:
        """Return the image of a rank's staging buffer, uint8."""
        return self._images[rank]


def _image_starts(layout: WeightLayout) -> list[int]:
    """Return the first byte of each rank's image in a receive buffer, and the end of the last one."""
    starts = [0]
    for rank in layout.ranks:
        starts.append(starts[-1] + -(-rank.buffer_bytes // BLOCK_BYTES) * BLOCK_BYTES)
    return starts


def _images(file: SharedFile, layout: WeightLayout) -> list[torch.Tensor]:
    starts = _image_starts(layout)[:-1]
    return [
        file.bytes[start : start + rank.buffer_bytes]
        for start, rank in zip(starts, layout.ranks, strict=True)
    ]


def received_images(path: Path, layout: WeightLayout) -> list[torch.Tensor]:
    """Return the weights in another process's receive buffer, by rank, in their dtype."""
    file = SharedFile(path, _image_starts(layout)[-1], is_new=False)
    return [
        image[: rank.num_bytes].view(layout.dtype)
        for rank, image in zip(layout.ranks, _images(file, layout), strict=True)
    ]


class WeightFetcher:
    """Fetches one version after another into the receive buffer."""

    def __init__(
        self,
        *,
        layout: WeightLayout,
        needed: Sequence[np.ndarray],
        num_bytes_needed: int,
        receive_buffer: ReceiveBuffer,
        transports: Mapping[int, Transport],
        delta: bool,
        share: HostShare = ALONE,
    ) -> None:
        """``needed`` has a mask of the blocks (bool) that the engine needs, for every rank."""
        self._layout = layout
        self._needed_by_all = list(needed)
        self._num_bytes_needed = num_bytes_needed
        self._receive_buffer = receive_buffer
        self._transports = transports
        self._delta = delta
        self._held = [np.zeros(rank.num_blocks, np.uint64) for rank in layout.ranks]
        self._is_held = [np.zeros(rank.num_blocks, bool) for rank in layout.ranks]
        self._held_of = [np.zeros(rank.num_blocks, np.uint64) for rank in layout.ranks]
        self.take_share(share)

    def take_share(self, share: HostShare) -> None:
        """Change the share that this generator fetches.

        Blocks that were fetched before do not count as held: the generators of the host have changed, and
        others may have overwritten them.
        """
        self._needed = [
            blocks & share.of_blocks(rank, self._transports[rank.rank].granularity)
            if rank.num_bytes
            else blocks
            for rank, blocks in zip(self._layout.ranks, self._needed_by_all, strict=True)
        ]
        for held in (*self._is_held, *self._held_of):
            held[:] = 0

    def connect(self, transports: Mapping[int, Transport]) -> None:
        """Read from other staging buffers of the same layout, starting with the next fetch."""
        self._transports = transports

    async def fetch(self, manifest: Manifest) -> FetchReport:
        """Copy and check the blocks of a version that the engine needs. Call while its slot is leased.

        Raises:
            ValueError: The manifest was written in another layout.
        """
        if manifest.layout_digest != self._layout.digest:
            raise ValueError(
                f"version {manifest.version} was published in layout {manifest.layout_digest}, "
                f"this generator knows {self._layout.digest}; must be equal: the trainer was restarted with "
                "another mesh"
            )
        start_s = time.perf_counter()
        reads = [
            _RankRead(
                rank=rank,
                transport=self._transports[rank.rank],
                received=self._receive_buffer.image(rank.rank),
                expected=manifest.checksums[rank.rank],
                held=self._held[rank.rank],
                is_held=self._is_held[rank.rank],
                held_of=self._held_of[rank.rank],
                patches=manifest.patches[rank.rank] if manifest.patches else (),
                unit=np.dtype(f"u{self._layout.dtype.itemsize}"),
            )
            for rank in self._layout.ranks
            if rank.num_bytes
        ]
        for read in reads:
            read.invalidate(is_delta=self._delta)
        await asyncio.gather(*(read.run(manifest.slot, self._needed[read.rank.rank]) for read in reads))
        return FetchReport(
            version=manifest.version,
            is_complete=all(read.is_complete(self._needed[read.rank.rank]) for read in reads),
            num_bytes_moved=sum(read.num_bytes_moved for read in reads),
            num_bytes_needed=self._num_bytes_needed,
            num_bad_blocks=sum(read.num_bad_blocks for read in reads),
            fetch_s=time.perf_counter() - start_s,
            failure=next((read.failure for read in reads if read.failure is not None), None),
        )


@dataclass(slots=True, kw_only=True)
class _RankRead:
    """One fetch from one rank."""

    rank: RankLayout
    transport: Transport
    received: torch.Tensor
    expected: np.ndarray
    held: np.ndarray
    """Checksum of what each block had when it was last checked."""
    is_held: np.ndarray
    """Whether each block has the version."""
    held_of: np.ndarray
    """Digest of the version whose bytes each block has, uint64; 0: unknown."""
    patches: Sequence[Patch]
    unit: np.dtype[Any]
    """Unsigned integers of the size of an element."""
    num_bytes_moved: int = 0
    num_bad_blocks: int = 0
    failure: str | None = None
    _memory: np.ndarray = field(init=False)
    _digest: int = field(init=False)

    def __post_init__(self) -> None:
        self._memory = self.received.numpy()
        self._digest = digest_of(self.expected)

    def invalidate(self, *, is_delta: bool) -> None:
        """Drop blocks that are not part of the version; without a delta, drop all."""
        self.is_held &= (self.held == self.expected) if is_delta else np.False_
        self.held_of[self.is_held] = self._digest

    def is_complete(self, needed: np.ndarray) -> bool:
        return bool(self.is_held[needed].all())

    async def run(self, slot: int, needed: np.ndarray) -> None:
        for _ in range(MAX_ATTEMPTS):
            wanted = needed & ~self.is_held
            if not wanted.any():
                return
            plan, ranges = self._plan(wanted)
            for start, stop in ranges:
                read = slice(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
                self.is_held[read], self.held_of[read] = False, 0
                self.num_bytes_moved += stop - start
            try:
                await self.transport.read(slot, ranges, self.received, self._check)
                if plan is not None:
                    await asyncio.to_thread(self._patch, plan)
            except (ConnectionError, TimeoutError) as error:
                # The next attempt asks for the missing blocks only.
                self.failure = f"{type(error).__name__}: {error}"
                logger.warning("reading from trainer rank %d failed: %s", self.rank.rank, self.failure)

    def _plan(self, wanted: np.ndarray) -> tuple[PatchPlan | None, list[ByteRange]]:
        """Return the patches to apply, and the ranges to read for them and for all other wanted blocks."""
        unit, end = self.transport.granularity, self.rank.buffer_bytes
        whole = byte_ranges(wanted, unit, end)
        plan = PatchPlan(self.patches, wanted, self.held_of)
        if not plan.blocks.any():
            return None, whole
        read = plan.needs(BLOCK_BYTES, -(-end // BLOCK_BYTES))
        read[: len(wanted)] |= wanted & ~plan.blocks
        ranges = byte_ranges(read, unit, end)
        return (plan, ranges) if _sum(ranges) < _sum(whole) else (None, whole)

    def _patch(self, plan: PatchPlan) -> None:
        # A range may have covered a block that patches were planned for: it has other bytes then.
        for block in np.flatnonzero(plan.blocks & (self.held_of != 0) & ~self.is_held):
            where = block_range(int(block), self.rank.num_bytes)
            if plan.apply(block, self._memory, self._memory[where].view(self.unit)):
                self._check((where.start, where.stop))
            else:
                self.num_bad_blocks += 1
            if not self.is_held[block]:
                self.held_of[block] = 0

    def _check(self, arrived: ByteRange) -> None:
        start, stop = arrived
        for block in range(start // BLOCK_BYTES, min(-(-stop // BLOCK_BYTES), len(self.expected))):
            found = checksum(self._memory[block_range(block, self.rank.num_bytes)])
            self.held[block] = found
            self.is_held[block] = found == self.expected[block]
            self.num_bad_blocks += int(not self.is_held[block])
            if self.is_held[block]:
                self.held_of[block] = self._digest


def _sum(ranges: Sequence[ByteRange]) -> int:
    return sum(stop - start for start, stop in ranges)


def byte_ranges(wanted: np.ndarray, granularity: int, num_bytes: int) -> list[ByteRange]:
    """Return maximal ranges, at multiples of ``granularity``, that cover the blocks ``wanted`` (bool)."""
    blocks_per_unit = granularity // BLOCK_BYTES
    num_units = -(-len(wanted) // blocks_per_unit)
    padded = np.zeros(num_units * blocks_per_unit, bool)
    padded[: len(wanted)] = wanted
    units = padded.reshape(num_units, blocks_per_unit).any(axis=1)
    edges = np.flatnonzero(np.diff(units, prepend=False, append=False).astype(np.int8))
    return [
        (int(first) * granularity, min(int(last) * granularity, num_bytes))
        for first, last in zip(edges[::2], edges[1::2], strict=True)
    ]
