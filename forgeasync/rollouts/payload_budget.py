"""Bounds the bytes of payloads, as a pure state machine: no clock, no I/O, no actors.

Back-pressure: a group reserves the most that it should take before its first token is sampled, so that there
is room for it once it is generated. Once written it counts with its real size, until its optimizer step has
committed or it is dropped. A few groups are larger than what they reserve: where logits tie, more tokens are
kept than top_k says. These may go into the excess, which all groups share, and are refused when that is used
up.

The bound. ``reserve`` keeps held + reserved <= capacity; ``settle`` raises that sum only where it stays so;
``release`` lowers it.

No deadlock. Let G be groups_per_step, W the most that a group reserves, and capacity >= G * W. What groups
take beyond their reservations is, for all groups present together, at most the excess E = capacity - G * W
(``largest_excess``). Suppose ``reserve`` refuses a group. With g groups present, which take g * W + E at
most, it would have fitted if g * W + E + W <= capacity, that is g + 1 <= G; so g >= G. If every admitted
group eventually finishes, there comes a time at which all of them, G or more, are complete (or dropped or
refused, which releases them), and then the replay buffer gives the trainer its batch: buffer/replay_buffer.py
proves that the trainer never waits once all groups are complete. That step commits and releases G groups,
whose place is free for others. ``settle`` waits for nothing: a group that waited there for room would be one
that does not finish. Were it allowed to grow into all of the capacity, G - 1 complete groups could keep the
last one of their step out for ever. With several hosts the same holds for each host's budget on its own, as a
group lies on one host. Groups must reserve in the order in which they are admitted: small ones that overtake
could keep a large one out for ever.
"""

from forgeasync.waiting import Monitor


def largest_excess(capacity_bytes: int, groups_per_step: int, worst_case_bytes: int) -> int:
    """Return the bytes that groups together may take beyond their reservations so that a run cannot stall.

    Below 0 the run can stall: one step's groups do not fit, each with all it reserves.
    """
    return capacity_bytes - groups_per_step * worst_case_bytes


class PayloadBudget:
    """Bytes of one host's payloads, by group. All sizes are what files take (``group_num_bytes``)."""

    def __init__(self, capacity_bytes: int, *, excess_bytes: int) -> None:
        """``excess_bytes`` is what all groups together may take beyond their reservations."""
        assert 0 <= excess_bytes <= capacity_bytes
        self._capacity_bytes = capacity_bytes
        self._excess_bytes = excess_bytes
        self._reserved: dict[int, int] = {}
        self._held: dict[int, int] = {}
        # By group, what of it is beyond its reservation.
        self._excess: dict[int, int] = {}
        self._num_bytes_reserved = 0
        self._num_bytes_held = 0

    @property
    def num_bytes_reserved(self) -> int:
        """Most that the groups being generated can take."""
        return self._num_bytes_reserved

    @property
    def num_bytes_held(self) -> int:
        """Bytes of the groups that are written."""
        return self._num_bytes_held

    def num_free(self, worst_case_bytes: int) -> int:
        """Groups that could still reserve ``worst_case_bytes`` each."""
        free_bytes = self._capacity_bytes - self._num_bytes_held - self._num_bytes_reserved
        return max(0, free_bytes // worst_case_bytes)

    def reserve(self, group_id: int, worst_case_bytes: int) -> bool:
        """Whether a group may start; if so, ``worst_case_bytes`` are kept for it."""
        assert group_id not in self._reserved and group_id not in self._held, f"group {group_id} is present"
        assert worst_case_bytes <= self._capacity_bytes, (
            f"group {group_id} asks for {worst_case_bytes} bytes of {self._capacity_bytes}: never to start"
        )
        if self._num_bytes_held + self._num_bytes_reserved + worst_case_bytes > self._capacity_bytes:
            return False
        self._reserved[group_id] = worst_case_bytes
        self._num_bytes_reserved += worst_case_bytes
        return True

    def settle(self, group_id: int, actual_bytes: int) -> bool:
        """Whether a group that was written may stay; if so, it counts with its real size from now on.

        If not, it is larger than its reservation and the rest of the excess. It keeps its reservation until
        its file is freed and it is released.
        """
        reserved = self._reserved[group_id]
        excess = max(0, actual_bytes - reserved)
        num_bytes = self._num_bytes_held + self._num_bytes_reserved - reserved + actual_bytes
        if excess and (
            num_bytes > self._capacity_bytes or sum(self._excess.values()) + excess > self._excess_bytes
        ):
            return False
        del self._reserved[group_id]
        self._num_bytes_reserved -= reserved
        self._held[group_id] = actual_bytes
        self._excess[group_id] = excess
        self._num_bytes_held += actual_bytes
        return True

    def release(self, group_id: int) -> None:
        """A group's step has committed, or it was dropped, written or not."""
        if group_id in self._held:
            self._num_bytes_held -= self._held.pop(group_id)
            del self._excess[group_id]
        else:
            self._num_bytes_reserved -= self._reserved.pop(group_id)


class AsyncPayloadBudget(Monitor[PayloadBudget]):
    """A ``PayloadBudget`` shared by the loops of one event loop; every group reserves the same."""

    def __init__(self, state: PayloadBudget, *, largest_group_bytes: int) -> None:
        super().__init__(state)
        self._largest_group_bytes = largest_group_bytes
        self.num_waits = 0
        """Groups that had to wait for room."""

    def metrics(self) -> dict[str, float]:
        """Return bytes held now, and counts since the run began, under their names in metrics.jsonl."""
        return {
            "payload/num_bytes_held": self.state.num_bytes_held,
            "payload/num_bytes_reserved": self.state.num_bytes_reserved,
            "payload/num_waits": self.num_waits,
        }

    @property
    def num_free(self) -> int:
        """Groups that would not have to wait."""
        return self.state.num_free(self._largest_group_bytes)

    async def reserve(self, group_id: int) -> None:
        """Wait until the group's largest payload fits in."""
        if self.state.reserve(group_id, self._largest_group_bytes):
            return
        self.num_waits += 1
        await self.until(lambda budget: budget.reserve(group_id, self._largest_group_bytes))

    async def settle(self, group_id: int, num_bytes: int) -> bool:
        """Whether the group that was written may stay; if not, free its file and ``release`` it."""
        return self.change(lambda budget: budget.settle(group_id, num_bytes))

    async def release(self, group_id: int) -> None:
        """The group's payloads are freed, or it will have none."""
        self.change(lambda budget: budget.release(group_id))
