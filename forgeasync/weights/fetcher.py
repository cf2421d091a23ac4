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
from dataclasses import dataclass
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
        self._num_bytes_needed = num_bytes_needed
        self._transports = transports
        self._delta = delta
        unit = np.dtype(f"u{layout.dtype.itemsize}")
        self._images = [
            _RankImage(rank, receive_buffer.image(rank.rank), blocks, unit)
            for rank, blocks in zip(layout.ranks, needed, strict=True)
            if rank.num_bytes
        ]
        self.take_share(share)

    def take_share(self, share: HostShare) -> None:
        """Change the share that this generator fetches.

        Blocks that were fetched before do not count as held: the generators of the host have changed, and
        others may have overwritten them.
        """
        for image in self._images:
            image.take_share(share, self._transports[image.rank.rank].granularity)

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
        await asyncio.gather(
            *(
                image.fetch(manifest, self._transports[image.rank.rank], is_delta=self._delta)
                for image in self._images
            )
        )
        return FetchReport(
            version=manifest.version,
            is_complete=all(image.is_complete for image in self._images),
            num_bytes_moved=sum(image.num_bytes_moved for image in self._images),
            num_bytes_needed=self._num_bytes_needed,
            num_bad_blocks=sum(image.num_bad_blocks for image in self._images),
            fetch_s=time.perf_counter() - start_s,
            failure=next((image.failure for image in self._images if image.failure is not None), None),
        )


class _RankImage:
    """The image of one rank's staging buffer, with what is known of its blocks."""

    def __init__(
        self, rank: RankLayout, received: torch.Tensor, needed: np.ndarray, unit: np.dtype[Any]
    ) -> None:
        """``unit`` are unsigned integers of the size of an element."""
        self.rank = rank
        self._received, self._memory = received, received.numpy()
        self._needed_by_all, self._unit = needed, unit
        self._held = np.zeros(rank.num_blocks, np.uint64)
        """Checksum of what each block had when it was last checked."""
        self._is_held = np.zeros(rank.num_blocks, bool)
        """Whether each block has the version that is fetched."""
        self._held_of = np.zeros(rank.num_blocks, np.uint64)
        """Digest of the version whose bytes each block has; 0: unknown."""

    def take_share(self, share: HostShare, granularity: int) -> None:
        self._needed = self._needed_by_all & share.of_blocks(self.rank, granularity)
        self._is_held[:] = self._held_of[:] = 0

    @property
    def is_complete(self) -> bool:
        return bool(self._is_held[self._needed].all())

    async def fetch(self, manifest: Manifest, transport: Transport, *, is_delta: bool) -> None:
        """Fetch the blocks of a version, all of them without a delta."""
        self.num_bytes_moved = self.num_bad_blocks = 0
        self.failure: str | None = None
        self._expected = manifest.checksums[self.rank.rank]
        self._digest = digest_of(self._expected)
        patches = manifest.patches[self.rank.rank] if manifest.patches else ()
        self._is_held &= (self._held == self._expected) if is_delta else np.False_
        self._held_of[self._is_held] = self._digest
        for _ in range(MAX_ATTEMPTS):
            wanted = self._needed & ~self._is_held
            if not wanted.any():
                return
            plan, ranges = self._plan(wanted, patches, transport.granularity)
            for start, stop in ranges:
                read = slice(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
                self._is_held[read], self._held_of[read] = False, 0
                self.num_bytes_moved += stop - start
            try:
                await transport.read(manifest.slot, ranges, self._received, self._check)
                if plan is not None:
                    await asyncio.to_thread(self._patch, plan)
            except (ConnectionError, TimeoutError) as error:
                # The next attempt asks for the missing blocks only.
                self.failure = f"{type(error).__name__}: {error}"
                logger.warning("reading from trainer rank %d failed: %s", self.rank.rank, self.failure)

    def _plan(
        self, wanted: np.ndarray, patches: Sequence[Patch], granularity: int
    ) -> tuple[PatchPlan | None, list[ByteRange]]:
        """Return the patches to apply, and the ranges to read for them and for all other wanted blocks."""
        end = self.rank.buffer_bytes
        whole = byte_ranges(wanted, granularity, end)
        plan = PatchPlan(patches, wanted, self._held_of)
        if not plan.blocks.any():
            return None, whole
        read = plan.needs(BLOCK_BYTES, -(-end // BLOCK_BYTES))
        read[: len(wanted)] |= wanted & ~plan.blocks
        ranges = byte_ranges(read, granularity, end)
        return (plan, ranges) if _sum(ranges) < _sum(whole) else (None, whole)

    def _patch(self, plan: PatchPlan) -> None:
        # A range may have covered a block that patches were planned for: it has other bytes then.
        for block in np.flatnonzero(plan.blocks & (self._held_of != 0) & ~self._is_held):
            where = block_range(int(block), self.rank.num_bytes)
            if plan.apply(block, self._memory, self._memory[where].view(self._unit)):
                self._check((where.start, where.stop))
            else:
                self.num_bad_blocks += 1
            if not self._is_held[block]:
                self._held_of[block] = 0

    def _check(self, arrived: ByteRange) -> None:
        start, stop = arrived
        for block in range(start // BLOCK_BYTES, min(-(-stop // BLOCK_BYTES), len(self._expected))):
            found = checksum(self._memory[block_range(block, self.rank.num_bytes)])
            self._held[block] = found
            self._is_held[block] = found == self._expected[block]
            self.num_bad_blocks += int(not self._is_held[block])
            if self._is_held[block]:
                self._held_of[block] = self._digest


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
