"""Appends events to a journal without holding up the event loop.

Events are given their lines at once, in order. A thread writes and flushes them in batches: at most
``SYNC_EVERY_S`` and one flush after they happened, at once where somebody waits for it. While the disk is
full or fails, they are kept and tried again: whoever waits for them waits longer.
"""

import asyncio
import functools
import time
from collections.abc import Sequence

from forgeasync.faults import Refusal, is_refusal
from forgeasync.ledger.journal_file import JournalFile, JournalNotWritten
from forgeasync.ledger.lines import AnyEvent, LedgerPosition, encode_lines
from forgeasync.waiting import Monitor

SYNC_EVERY_S = 0.2
"""Time in which events gather before they are written. A death of the machine loses no more than these, and
those that are being written."""


RETRY_S = 1.0
"""Seconds between two attempts at writing what the disk has refused."""


class Journal:
    """The end of a journal. All calls come from one event loop."""

    def __init__(self, file: JournalFile, position: LedgerPosition) -> None:
        self._file = file
        self.position = position
        self._num_durable = position.num_lines
        self._pending: list[bytes] = []
        self._oldest_s = 0.0
        self._failure: Exception | None = None
        self._writing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._refusal: Refusal | None = None
        self._monitor = Monitor(self)
        self._longest_behind_s = 0.0

    def append(self, events: Sequence[AnyEvent]) -> None:
        """Append events; they are on the disk a moment later.

        Raises:
            JournalNotWritten: something before cannot be written, not even later.
        """
        if self._failure is not None:
            raise self._failure
        if not events:
            return
        data, self.position = encode_lines(events, self.position)
        if not self._pending:
            self._oldest_s = time.monotonic()
        self._pending.append(data)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def durable(self) -> None:
        """Wait until everything that was appended so far is on the disk.

        Raises:
            JournalNotWritten: it cannot be written, not even later.
        """
        num_lines = self.position.num_lines
        self._hurry.set()
        await self._monitor.until(
            lambda journal: journal._num_durable >= num_lines or journal._failure is not None
        )
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Write what is left, and close the file.

        Raises:
            JournalNotWritten: it cannot be written, not even later.
        """
        await self.durable()
        self._file.close()

    @property
    def refusal(self) -> Refusal | None:
        """What the disk refuses at this moment, so that ``durable`` waits."""
        return self._refusal

    def metrics(self) -> dict[str, float]:
        """Return metrics under their names in metrics.jsonl; delays are those since the last call."""
        longest_s, self._longest_behind_s = self._longest_behind_s, 0.0
        return {"ledger/num_events": self.position.num_lines, "ledger/behind_s": longest_s}

    async def _write(self) -> None:
        """Write until nothing is left."""
        try:
            while self._pending:
                try:
                    await asyncio.wait_for(self._hurry.wait(), SYNC_EVERY_S)
                except TimeoutError:
                    # Nobody waits for these; they have gathered long enough.
                    pass
                self._hurry.clear()
                data, oldest_s, num_lines = b"".join(self._pending), self._oldest_s, self.position.num_lines
                self._pending.clear()
                await self._until_written(data)
                self._longest_behind_s = max(self._longest_behind_s, time.monotonic() - oldest_s)
                self._monitor.change(functools.partial(Journal._set_durable, num_lines=num_lines))
        except Exception as error:
            # Who appends or waits next is told.
            self._monitor.change(functools.partial(Journal._fail, error=error))
        finally:
            self._writing = None

    async def _until_written(self, data: bytes) -> None:
        while True:
            try:
                await asyncio.to_thread(self._file.write, data)
            except JournalNotWritten as error:
                if not is_refusal(error):
                    raise
                # The file has kept all of it.
                data = b""
                self._refusal = Refusal(path=str(self._file.path), reason=error.strerror or str(error))
                await asyncio.sleep(RETRY_S)
            else:
                self._refusal = None
                return

    def _set_durable(self, num_lines: int) -> None:
        self._num_durable = num_lines

    def _fail(self, error: Exception) -> None:
        self._failure = error
