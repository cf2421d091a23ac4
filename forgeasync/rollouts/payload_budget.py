"""Bounds the memory of one host's payloads. A pure state machine: no clock, no I/O, no actors.

Back-pressure: before its first token is sampled, a group reserves its worst-case size, so that its payloads
have room once they are generated. A written group counts with its real size, until its optimizer step has
committed or the group is dropped. A few groups are larger than their reservation, because ties of logits can
keep more tokens than top_k. Such groups may use the excess, which all groups share; when it is used up, they
are refused.

The bound: ``reserve`` keeps held + reserved <= capacity. ``settle`` raises this sum only if it stays within
the capacity, and ``release`` lowers it.

No deadlock: Let G be groups_per_step, W the size that each group reserves, and capacity >= G * W. All groups
present together take at most the excess E = capacity - G * W (``largest_excess``) beyond their reservations.
Suppose ``reserve`` refuses a group while g groups are present. They take at most g * W + E, so the group
would fit if g * W + E + W <= capacity, that is, if g + 1 <= G. Hence g >= G. If every admitted group
eventually finishes, then at some time all of them, G or more, are complete (or dropped or refused, which
releases them). The replay buffer then gives the trainer its batch: docs/off_policy.md proves that the trainer
never waits once all groups are complete. That step commits and releases G groups, which makes room for
others. ``settle`` never waits, because a group that waited there for room would not finish. If groups could
grow into the whole capacity, G - 1 complete groups could block the last one of their step forever. With
several hosts, the argument holds for each host's budget separately, because a group lies on one host. Groups
must reserve in the order in which they are admitted; otherwise small groups could block a large one forever.
"""

from forgeasync.waiting import Monitor


def largest_excess(capacity_bytes: int, groups_per_step: int, worst_case_bytes: int) -> int:
    """Return the bytes that all groups together may take beyond their reservations without a deadlock.

    If the result is negative, the reservations of one step's groups do not fit, and the run can stall.
    """
    return capacity_bytes - groups_per_step * worst_case_bytes


class PayloadBudget:
    """Bytes of one host's payloads, by group. All sizes are those of files (``group_num_bytes``)."""

    def __init__(self, capacity_bytes: int, *, excess_bytes: int) -> None:
        """Create an empty budget.

        Args:
            capacity_bytes: Maximum bytes of all payloads and reservations.
            excess_bytes: Maximum bytes that all groups together may take beyond their reservations.
        """
        assert 0 <= excess_bytes <= capacity_bytes
        self._capacity_bytes = capacity_bytes
        self._excess_bytes = excess_bytes
        self._reserved: dict[int, int] = {}
        self._held: dict[int, int] = {}
        # Bytes of each written group beyond its reservation.
        self._excess: dict[int, int] = {}

    @property
    def num_bytes_reserved(self) -> int:
        """Bytes reserved for the groups that are being generated."""
        return sum(self._reserved.values())

    @property
    def num_bytes_held(self) -> int:
        """Bytes of the written groups."""
        return sum(self._held.values())

    @property
    def num_bytes_free(self) -> int:
        """Bytes that are neither reserved nor held."""
        return self._capacity_bytes - self.num_bytes_held - self.num_bytes_reserved

    def reserve(self, group_id: int, worst_case_bytes: int) -> bool:
        """Reserve ``worst_case_bytes`` for a group if they fit; return whether they did."""
        assert group_id not in self._reserved and group_id not in self._held, f"group {group_id} is present"
        assert worst_case_bytes <= self._capacity_bytes, (
            f"group {group_id} asks for {worst_case_bytes} bytes of {self._capacity_bytes}: cannot start"
        )
        if worst_case_bytes > self.num_bytes_free:
            return False
        self._reserved[group_id] = worst_case_bytes
        return True

    def settle(self, group_id: int, actual_bytes: int) -> bool:
        """Replace the reservation of a written group by its real size if it fits; return whether it did.

        A group is refused if it exceeds its reservation by more than what remains of the excess or the
        capacity. It keeps its reservation: free its file, then call ``release``.
        """
        excess = max(0, actual_bytes - self._reserved[group_id])
        excess_left = self._excess_bytes - sum(self._excess.values())
        if excess > min(self.num_bytes_free, excess_left):
            return False
        del self._reserved[group_id]
        self._held[group_id] = actual_bytes
        self._excess[group_id] = excess
        return True

    def release(self, group_id: int) -> None:
        """Remove a group, because its step has committed or it was dropped, written or not."""
        if group_id in self._held:
            del self._held[group_id], self._excess[group_id]
        else:
            del self._reserved[group_id]


class AsyncPayloadBudget(Monitor[PayloadBudget]):
    """A ``PayloadBudget`` shared by the tasks of one event loop. Every group reserves the same size."""

    def __init__(self, state: PayloadBudget, *, largest_group_bytes: int) -> None:
        super().__init__(state)
        self._largest_group_bytes = largest_group_bytes
        self.num_waits = 0
        """Number of groups that had to wait for room."""

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl: current bytes, and waits since the start."""
        return {
            "payload/num_bytes_held": self.state.num_bytes_held,
            "payload/num_bytes_reserved": self.state.num_bytes_reserved,
            "payload/num_waits": self.num_waits,
        }

    @property
    def num_free(self) -> int:
        """Number of further groups that could reserve without waiting."""
        return max(0, self.state.num_bytes_free // self._largest_group_bytes)

    async def reserve(self, group_id: int) -> None:
        """Wait until the group's worst-case size fits, and reserve it."""
        if self.state.reserve(group_id, self._largest_group_bytes):
            return
        self.num_waits += 1
        await self.until(lambda budget: budget.reserve(group_id, self._largest_group_bytes))

    async def settle(self, group_id: int, num_bytes: int) -> bool:
        """Replace the reservation of a written group by its real size if it fits; return whether it did.

        If not, free the group's file and call ``release``.
        """
        return self.change(lambda budget: budget.settle(group_id, num_bytes))

    async def release(self, group_id: int) -> None:
        """Remove a group whose payloads are freed, or that will have none."""
        self.change(lambda budget: budget.release(group_id))
