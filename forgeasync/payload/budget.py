"""How many bytes of payloads may exist at once, as a pure state machine: no clock, no I/O, no actors.

Back-pressure: a group reserves the most that it could take before its first token is sampled, so that nothing
already generated ever lacks a place. Once written it counts with its real size, until its optimizer step has
committed or it is dropped.

The bound. ``reserve`` keeps held + reserved <= capacity, ``settle`` never raises that sum (a group takes at
most what it reserved), ``release`` lowers it.

No deadlock. Let G be groups_per_step, W the most that a group can take, and capacity >= G * W, which ``fits``
checks. Suppose ``reserve`` refuses a group. With g groups present, each holding or reserving at most W, it
would have fitted if g * W + W <= capacity; so g >= G. If every admitted group eventually finishes, there
comes a time at which all of them, G or more, are complete (or dropped, which releases them), and then the
replay buffer gives the trainer its batch: buffer/replay_buffer.py proves that the trainer never waits once
all groups are complete. That step commits and releases G groups, whose place is free for others. With several
hosts the same holds for each host's budget on its own, as a group lies on one host. Groups must reserve in
the order in which they are admitted: small ones that overtake could keep a large one out for ever.
"""


def fits(capacity_bytes: int, groups_per_step: int, worst_case_bytes: int) -> bool:
    """Whether a run with this capacity cannot stall: one step's groups fit at their largest."""
    return capacity_bytes >= groups_per_step * worst_case_bytes


class PayloadBudget:
    """Bytes of one host's payloads, by group. All sizes are what files take (``group_num_bytes``)."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._reserved: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._num_bytes_reserved = 0
        self._num_bytes_held = 0

    @property
    def num_bytes_reserved(self) -> int:
        """Most that the groups being generated can take."""
        return self._num_bytes_reserved

    @property
    def num_bytes_held(self) -> int:
        """What the groups that are written take."""
        return self._num_bytes_held

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

    def settle(self, group_id: int, actual_bytes: int) -> None:
        """A group was written: from now on it counts with its real size."""
        reserved = self._reserved.pop(group_id)
        assert actual_bytes <= reserved, (
            f"group {group_id} takes {actual_bytes} bytes, but only {reserved} were reserved for it"
        )
        self._num_bytes_reserved -= reserved
        self._held[group_id] = actual_bytes
        self._num_bytes_held += actual_bytes

    def release(self, group_id: int) -> None:
        """A group's step has committed, or it was dropped, written or not."""
        if group_id in self._held:
            self._num_bytes_held -= self._held.pop(group_id)
        else:
            self._num_bytes_reserved -= self._reserved.pop(group_id)
