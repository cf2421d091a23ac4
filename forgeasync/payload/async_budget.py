"""The payload budget for loops that wait.

Who waits for whom: the collecting loop waits in ``reserve`` until the training loop's ``release`` makes room.
"""

import asyncio

from forgeasync.payload.budget import PayloadBudget


class AsyncPayloadBudget:
    """A ``PayloadBudget`` shared by the loops of one event loop; every group reserves the same."""

    def __init__(self, state: PayloadBudget, *, largest_group_bytes: int) -> None:
        self.state = state
        self._largest_group_bytes = largest_group_bytes
        self._changed = asyncio.Condition()
        self.num_waits = 0
        """Groups that had to wait for room."""

    async def reserve(self, group_id: int) -> None:
        """Wait until the group's largest payload fits in."""
        async with self._changed:
            if self.state.reserve(group_id, self._largest_group_bytes):
                return
            self.num_waits += 1
            await self._changed.wait_for(lambda: self.state.reserve(group_id, self._largest_group_bytes))

    async def settle(self, group_id: int, num_bytes: int) -> bool:
        """Whether the group that was written may stay; if not, free its file and ``release`` it."""
        may_stay = self.state.settle(group_id, num_bytes)
        if may_stay:
            await self._notify()
        return may_stay

    async def release(self, group_id: int) -> None:
        """The group's payloads are freed, or it will have none."""
        self.state.release(group_id)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
