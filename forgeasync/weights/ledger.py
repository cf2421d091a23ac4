"""Decides who may write and who may read which staging buffer: a pure state machine, time is an argument.

There are two buffers (slots). The publisher writes a version into a slot that nobody reads, if possible not
into the slot of the newest version; readers lease the newest version while they copy it. With no slot free a
version is skipped and owed: it is published when a lease ends. A lease that outlives its deadline no longer
counts; if its reader is still copying, the checksums show it that its bytes changed.
"""

from dataclasses import dataclass, field
from enum import StrEnum

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
        # Late readers can still have the newest version, if there is another slot to write.
        choice = min(free, key=lambda i: newest is not None and self._slots[i].manifest is newest)
        self._slots[choice] = _Slot(state=SlotState.WRITING)
        self.is_owing = False
        return choice

    def commit(self, manifest: Manifest) -> None:
        """Note that a version is complete in its slot."""
        slot = self._slots[manifest.slot]
        assert slot.state is SlotState.WRITING, f"slot {manifest.slot} is {slot.state}"
        slot.state, slot.manifest = SlotState.COMMITTED, manifest

    def abandon(self, slot: int) -> None:
        """Discard a version whose publisher failed half-way; readers never see it."""
        assert self._slots[slot].state is SlotState.WRITING
        self._slots[slot] = _Slot()
        self.is_owing = True

    def forget_committed(self) -> None:
        """The staging buffers are new ones, and empty: no version can be read, and the newest one is owed.

        Leases end. A slot that is being written stays so: the new buffers get what is written.
        """
        for index, slot in enumerate(self._slots):
            if slot.state is SlotState.COMMITTED:
                self._slots[index] = _Slot()
                self.is_owing = True

    def acquire(
        self, reader: int, *, newer_than: int, now_s: float, preferred: int | None = None
    ) -> Manifest | None:
        """Lease the ``preferred`` version to a reader, or the newest one where a slot does not have that.

        None if there is none newer than ``newer_than``.
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
        """End a reader's lease, after its copy or its failure; without a lease nothing happens."""
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
