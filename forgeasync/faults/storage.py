"""Waiting for a disk that is full, or fails, for a while.

What a disk refuses is kept and written later (``forgeasync.faults.appended_file``), and whoever needs it on
the disk waits. Each outage is one fault of the role ``storage``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from forgeasync.faults.appended_file import Refusal
from forgeasync.faults.fault_log import Fault, FaultLog, Role

T = TypeVar("T")

RETRY_S = 1.0
"""Seconds between two attempts at writing what was refused."""

PATIENCE_S = 2.0
"""A call that may wait for a disk is asked whether it does after so long."""


class Keeping(Protocol):
    """A writer that keeps what the disk refuses."""

    def flush(self) -> Refusal | None:
        """Write what was kept; returns what is in the way."""
        ...


class StorageFaults:
    """Outages of the disks of a run, as its controller sees them. From the first refusal until nothing is
    refused any more is one fault. Times are those of the event loop."""

    def __init__(self, faults: FaultLog) -> None:
        self._faults = faults
        self._refused: set[str] = set()
        self._fault: Fault | None = None
        self.waited_s = 0.0
        """Seconds so far that callers have waited for disks that refused."""

    def refused(self, refusal: Refusal) -> None:
        """Note that something waits for room."""
        self._refused.add(refusal.path)
        if self._fault is None:
            what = f"cannot be written ({refusal.reason}): what is refused is kept and tried again"
            self._fault = self._faults.detected(Role.STORAGE, refusal.path, what)

    def accepted(self, path: str) -> None:
        """Note that nothing of a file waits; no news if nothing has waited."""
        self._refused.discard(path)
        if not self._refused and self._fault is not None:
            self._faults.recovered(self._fault, "was written")
            self._fault = None

    async def until_written(self, writers: Sequence[Keeping]) -> None:
        """Wait until nothing is kept by ``writers`` any more."""
        paths: set[str] = set()
        start_s = _now_s()
        while found := [refusal for one in writers if (refusal := one.flush()) is not None]:
            for refusal in found:
                paths.add(refusal.path)
                self.refused(refusal)
            await asyncio.sleep(RETRY_S)
        if paths:
            self.waited_s += _now_s() - start_s
        for path in paths:
            self.accepted(path)

    async def while_waiting(self, call: Awaitable[T], refusal: Callable[[], Awaitable[Refusal | None]]) -> T:
        """Wait for a call that may itself wait for a disk, and tell of it.

        ``refusal`` asks whoever answers the call what is in its way; it is asked only while the call waits.
        """
        waiting = asyncio.ensure_future(call)
        path, start_s = "", _now_s()
        try:
            while not (await asyncio.wait([waiting], timeout=PATIENCE_S))[0]:
                if (found := await refusal()) is not None:
                    path = found.path
                    self.refused(found)
            return waiting.result()
        finally:
            waiting.cancel()
            if path:
                self.waited_s += _now_s() - start_s
                self.accepted(path)

    def metrics(self) -> dict[str, float]:
        """Return ``waited_s`` under its name in metrics.jsonl."""
        return {"faults/storage_wait_s": self.waited_s}


def _now_s() -> float:
    return asyncio.get_running_loop().time()
