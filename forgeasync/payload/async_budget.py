"""The payload budget for loops that wait.

Who waits for whom: the collecting loop waits in ``reserve`` until the training loop's ``release`` makes room.
"""

from forgeasync.monitor import Monitor
from forgeasync.payload.budget import PayloadBudget


class AsyncPayloadBudget(Monitor[PayloadBudget]):
    """A ``PayloadBudget`` shared by the loops of one event loop; every group reserves the same."""

    def __init__(self, state: PayloadBudget, *, largest_group_bytes: int) -> None:
        super().__init__(state)
        self._largest_group_bytes = largest_group_bytes
        self.num_waits = 0
        """Groups that had to wait for room."""

    def metrics(self) -> dict[str, float]:
        """What is held now, and counts since the run began, under their names in metrics.jsonl."""
        return {
            "payload/num_bytes_held": self.state.num_bytes_held,
            "payload/num_bytes_reserved": self.state.num_bytes_reserved,
            "payload/num_waits": self.num_waits,
        }

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
