"""Lets loops wait for the ledger: the publishing loop asks for a slot, the serving loops for new versions.

Nobody waits for a reader. A publisher without a free slot skips the version, and
``until_owed`` returns once it can catch up; readers wait in ``lease`` for a version newer than theirs.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from forgeasync.waiting import Monitor
from forgeasync.weights.ledger import WeightLedger
from forgeasync.weights.manifest import Manifest

Stage = Callable[[int], Awaitable[Manifest]]
"""Copies the trainer's current weights into a slot."""


def _now_s() -> float:
    return asyncio.get_running_loop().time()


class WeightExchange(Monitor[WeightLedger]):
    """A ``WeightLedger`` shared by the loops of one event loop."""

    async def publish(self, stage: Stage) -> Manifest | None:
        """Stage and commit the weights; None if every slot is being read: the version is skipped and owed."""
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
            # Nothing signals that a lease has run out, so the clock must be checked.
            look_at_s=lambda ledger: ledger.next_deadline_s() if ledger.is_owing else None,
        )

    @asynccontextmanager
    async def lease(
        self, reader: int, *, newer_than: int, preferred: int | None = None
    ) -> AsyncIterator[Manifest]:
        """Wait for a version newer than ``newer_than``, and keep its slot from being overwritten.

        It is the ``preferred`` one where that is still there, else the newest.
        """
        manifest = await self.until(
            lambda ledger: ledger.acquire(reader, newer_than=newer_than, now_s=_now_s(), preferred=preferred)
        )
        try:
            yield manifest
        finally:
            self.change(lambda ledger: ledger.release(reader))
