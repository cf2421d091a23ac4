"""A published version, and the ledger of the staging buffers that may be written and read. Needs no torch.

There are two buffers (slots). The publisher writes a version into a slot without readers, if possible not
into the slot of the newest version. Readers lease the newest version while they copy it. If no slot is free,
a version is skipped and owed: it is published when a lease ends. A lease that outlives its deadline does not
count; if its reader is still copying, checksums reveal the changed bytes.

``WeightLedger`` is a pure state machine with time as an argument. ``WeightExchange`` adds waiting:
``until_owed`` returns once a publisher that skipped a version can publish again, and ``lease`` waits for a
version newer than the reader's. The publisher never waits for a reader.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import xxhash

from forgeasync.waiting import Monitor

BLOCK_BYTES = 256 * 2**10
"""Bytes that one checksum covers: few enough to be still in the CPU's cache after they were copied."""

NO_PART = np.iinfo(np.uint32).max
"""Size of a block's part in ``Patch.sizes`` if the block itself has to be fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Patch of one rank from a version to a newer one (see ``forgeasync.weights.patches``)."""

    base: int
    """Digest of the older version."""
    start: int
    """First byte of the patch in the staging buffer."""
    sizes: np.ndarray
    """Bytes of each block's part, uint32; ``NO_PART`` if the block itself has to be fetched."""

    def bounds(self) -> np.ndarray:
        """Return where the part of each block begins in the buffer, and where the last one ends, int64."""
        sizes = np.where(self.sizes == NO_PART, 0, self.sizes)
        return self.start + np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedShard:
    """One rank's part of a version, copied into one of its staging buffers."""

    rank: int
    version: int
    checksums: np.ndarray
    """Checksum of every block, uint64."""
    patches: tuple[Patch, ...] = ()
    """Patches from older versions, newest first."""
    archive_refusal: str | None = None
    """Why the archive leaves out versions; None: it has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a whole version, made after the version's last byte was staged."""

    version: int
    slot: int
    """Index of the staging buffer, of the two that every rank has."""
    layout_digest: str
    checksums: tuple[np.ndarray, ...]
    """Checksums of every rank's blocks, by rank."""
    patches: tuple[tuple[Patch, ...], ...] = ()
    """Patches of every rank, newest first, by rank; empty without ``weights.delta``."""
    archive_refusal: str | None = None
    """Why the archive leaves out versions, of the first rank that does; None: it has all."""

    @property
    def digest(self) -> str:
        """Digest of all bytes of the version. It also depends on the trainer's parallel layout."""
        digest = xxhash.xxh3_64()
        for of_rank in self.checksums:
            digest.update(of_rank.tobytes())
        return digest.hexdigest()


def checksum(block: memoryview | np.ndarray) -> int:
    """Return the xxh3 checksum (64 bits) of a block of at most ``BLOCK_BYTES``. Faster than a copy."""
    # numpy declares the buffer protocol from Python 3.12 on.
    return xxhash.xxh3_64_intdigest(block)  # type: ignore[arg-type]


def block_range(block: int, num_bytes: int) -> slice:
    """Return the bytes of a block in a buffer of ``num_bytes``; the last one may be shorter."""
    return slice(block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, num_bytes))


NUM_SLOTS = 2
"""Number of staging buffers of every trainer rank."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    is_writing: bool = False
    manifest: Manifest | None = None
    """Version that can be read; None while the slot is empty or is written."""
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
        return max(self._readable, key=lambda manifest: manifest.version, default=None)

    @property
    def _readable(self) -> list[Manifest]:
        return [slot.manifest for slot in self._slots if slot.manifest is not None]

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
        self._slots[choice] = _Slot(is_writing=True)
        self.is_owing = False
        return choice

    def commit(self, manifest: Manifest) -> None:
        """Record that a version is complete in its slot."""
        slot = self._slots[manifest.slot]
        assert slot.is_writing, f"slot {manifest.slot} is not written"
        slot.is_writing, slot.manifest = False, manifest

    def abandon(self, slot: int) -> None:
        """Discard a version whose publisher failed half-way. Readers never see it."""
        assert self._slots[slot].is_writing
        self._slots[slot] = _Slot()
        self.is_owing = True

    def forget_committed(self) -> None:
        """Record that the staging buffers are new and empty: no version can be read, and the newest is owed.

        Leases end. A slot that is being written keeps its state, because it is written to the new buffers.
        """
        for index, slot in enumerate(self._slots):
            if slot.manifest is not None:
                self._slots[index] = _Slot()
                self.is_owing = True

    def acquire(
        self, reader: int, *, newer_than: int, now_s: float, preferred: int | None = None
    ) -> Manifest | None:
        """Lease the ``preferred`` version to a reader, or the newest one if no slot has it.

        Returns the version's manifest, or None if no version is newer than ``newer_than``.
        """
        newer = [one for one in self._readable if one.version > newer_than]
        newest = max(newer, key=lambda manifest: manifest.version, default=None)
        manifest = next((one for one in newer if one.version == preferred), newest)
        if manifest is None:
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
        return not slot.is_writing and not slot.deadline_s_by_reader

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
