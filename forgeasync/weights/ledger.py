"""Decides who may write and who may read which staging buffer.

There are two buffers (slots). The publisher writes a version into a slot that nobody reads, if possible not
into the slot of the newest version. Readers lease the newest version while they copy it. If no slot is free,
a version is skipped and owed: it is published when a lease ends. A lease that outlives its deadline no longer
counts; if its reader is still copying, checksums show it that its bytes changed.

``WeightLedger`` is a pure state machine with time as an argument. ``WeightExchange`` lets loops wait for it:
nobody waits for a reader. ``until_owed`` returns once a publisher that skipped a version can publish again,
and ``lease`` waits for a version newer than the reader's.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from forgeasync.waiting import Monitor
from forgeasync.weights.manifest import Manifest

NUM_SLOTS = 2
"""Staging buffers of every trainer rank."""


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
    """Slots, the versions in them and the leases on them."""

    def __init__(self, *, lease_timeout_s: float) -> None:
        self._lease_timeout_s = lease_timeout_s
        self._slots = [_Slot() for _ in range(NUM_SLOTS)]
        self.is_owing = False
        """Whether a version was skipped and none was published since."""
        self.num_skipped = 0
        self.num_expired_leases = 0

    def metrics(self) -> dict[str, float]:
        """Counts since the run began, under their names in metrics.jsonl."""
        return {
            "weights/num_skipped_versions": self.num_skipped,
            "weights/num_expired_leases": self.num_expired_leases,
        }

    @property
    def newest(self) -> Manifest | None:
        """The newest version that can be read; None before the first one and while it is overwritten."""
        committed = [slot.manifest for slot in self._slots if slot.state is SlotState.COMMITTED]
        return max((m for m in committed if m is not None), key=lambda m: m.version, default=None)

    def can_begin(self, now_s: float) -> bool:
        """Whether ``begin`` would return a slot."""
        self._expire(now_s)
        return any(self._is_free(slot) for slot in self._slots)

    def begin(self, now_s: float) -> int | None:
        """Choose the slot for the next version; None if there is none: the version is skipped."""
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
        """Discard a version whose publisher failed half-way; readers never see it."""
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

        None if no version is newer than ``newer_than``.
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
        """Return when the next lease runs out; None without leases."""
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
    """A ``WeightLedger`` shared by the loops of one event loop."""

    async def publish(self, stage: Stage) -> Manifest | None:
        """Stage and commit the weights. None if every slot is in use: the version is skipped and owed."""
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
            # No event tells that a lease has run out: check the clock.
            look_at_s=lambda ledger: ledger.next_deadline_s() if ledger.is_owing else None,
        )

    @asynccontextmanager
    async def lease(
        self, reader: int, *, newer_than: int, preferred: int | None = None
    ) -> AsyncIterator[Manifest]:
        """Wait for a version newer than ``newer_than``, and keep its slot from being overwritten.

        The version is the ``preferred`` one if a slot still has it, else the newest.
        """
        manifest = await self.until(
            lambda ledger: ledger.acquire(reader, newer_than=newer_than, now_s=_now_s(), preferred=preferred)
        )
        try:
            yield manifest
        finally:
            self.change(lambda ledger: ledger.release(reader))
