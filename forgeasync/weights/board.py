"""The ledger for loops that wait: the publishing loop asks for a slot, the serving loops for new versions.

Who waits for whom: nobody waits for a reader. A publisher without a free slot skips the version, and
``until_owed`` tells who catches up later; readers wait in ``lease`` for a version newer than theirs.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from forgeasync.weights.ledger import WeightLedger
from forgeasync.weights.manifest import Manifest

Stage = Callable[[int], Awaitable[Manifest]]
"""Copies the trainer's current weights into a slot."""


class WeightBoard:
    """A ``WeightLedger`` shared by the loops of one event loop."""

    def __init__(self, ledger: WeightLedger) -> None:
        self.ledger = ledger
        self._changed = asyncio.Condition()

    async def publish(self, stage: Stage) -> Manifest | None:
        """Have the weights staged and show them; None if every slot is being read: skipped, and owed."""
        slot = self.ledger.begin(time.monotonic())
        if slot is None:
            await self._notify()
            return None
        try:
            manifest = await stage(slot)
        except BaseException:
            self.ledger.abandon(slot)
            raise
        self.ledger.commit(manifest)
        await self._notify()
        return manifest

    async def until_owed(self) -> None:
        """Wait until a version was skipped that could be published now."""
        async with self._changed:
            while not (self.ledger.is_owing and self.ledger.can_begin(time.monotonic())):
                deadline_s = self.ledger.next_deadline_s() if self.ledger.is_owing else None
                delay_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                try:
                    await asyncio.wait_for(self._changed.wait(), delay_s)
                except TimeoutError:
                    continue  # a lease has run out

    @asynccontextmanager
    async def lease(self, reader: int, *, newer_than: int) -> AsyncIterator[Manifest]:
        """Wait for a version newer than ``newer_than``, and keep its slot from being overwritten."""
        async with self._changed:
            while (
                manifest := self.ledger.acquire(reader, newer_than=newer_than, now_s=time.monotonic())
            ) is None:
                await self._changed.wait()
        try:
            yield manifest
        finally:
            self.ledger.release(reader)
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
