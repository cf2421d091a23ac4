"""Writes a run's ledger: the file, its background writer, and a replay buffer that records every change.

The process that changes the buffer also writes the ledger, so events need no transport and stay in order. The
disk may lag behind by ``SYNC_EVERY_S`` and the time of a flush, with two exceptions. A checkpoint begins only
when the ledger up to it is on disk, and the metrics of a step are reported only when the step is on disk.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from forgeasync.buffer.ledger_lines import (
    FORMAT,
    START,
    AnyEvent,
    Checkpointed,
    CheckpointedBuffer,
    Ended,
    LedgerPosition,
    Opened,
    Resumed,
    ResumedBuffer,
    encode_lines,
    position_after,
)
from forgeasync.buffer.replay_buffer import ReplayBuffer
from forgeasync.config import RunConfig
from forgeasync.files import AppendedFile, FileLocked, Refusal, flush, is_refusal, last_line, lock
from forgeasync.waiting import Monitor

LOCK_WAIT_S = 10.0
"""Seconds to wait for the lock of a killed run's journal. Its writer may outlive the controller briefly."""

SYNC_EVERY_S = 0.2
"""Seconds for which events are collected before they are written.

If the machine fails, only the events of this time and of the write in progress are lost.
"""

RETRY_S = 1.0
"""Seconds between two attempts to write to a disk that is full or fails."""

T = TypeVar("T")


class JournalNotWritten(OSError):
    """The disk did not accept the journal."""


class JournalInUse(RuntimeError):
    """Another process has the journal open for writing."""


class JournalFile:
    """Append-only journal file, locked by the single process that writes it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._file = AppendedFile(descriptor, is_flushed=True)

    @classmethod
    def create(cls, path: Path) -> "JournalFile":
        """Create an empty journal and flush its folder, so that the file survives a crash.

        Raises:
            FileExistsError: The file exists.
        """
        file = cls._open(path, os.O_CREAT | os.O_EXCL)
        flush(path.parent)
        return file

    @classmethod
    def reopen(cls, path: Path) -> "tuple[JournalFile, LedgerPosition]":
        """Open an existing journal to append to it; return it with the position of its end.

        Raises:
            ValueError: The last line is not a complete line of a ledger.
            JournalInUse: Another process has not released the journal within ``LOCK_WAIT_S``.
        """
        file = cls._open(path, 0)
        tail = last_line(file._descriptor)
        position = position_after(tail.removesuffix(b"\n")) if tail else START
        if position is None or (tail and not tail.endswith(b"\n")):
            file.close()
            raise ValueError(f"{path}: the last line is not a whole line of a ledger; run apps.verify on it")
        return file, position

    @classmethod
    def _open(cls, path: Path, flags: int) -> "JournalFile":
        descriptor = os.open(path, os.O_RDWR | flags, 0o644)
        try:
            # On a file system without locks this does nothing. The claim on the run's folder still excludes
            # a second controller.
            lock(descriptor, wait_s=LOCK_WAIT_S)
        except FileLocked:
            os.close(descriptor)
            raise JournalInUse(
                f"{path}: another process writes this ledger; end it first (a run in "
                "progress, or processes that a killed one left)"
            ) from None
        return cls(path, descriptor)

    def write(self, data: bytes) -> None:
        """Append ``data`` and wait until it is on disk.

        After an error, the file ends where it did before. The data stay in memory, and the next call writes
        them first; its own ``data`` may be empty.

        Raises:
            JournalNotWritten: The disk is full or fails.
        """
        try:
            self._file.write(data)
        except OSError as error:
            raise JournalNotWritten(
                error.errno,
                f"{error.strerror}; {self._file.num_kept_bytes} bytes of the ledger are not written",
                str(self.path),
            ) from error

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()


def cut_torn_line(path: Path) -> int:
    """Remove the incomplete last line that a killed process left; return its number of bytes, 0 if none.

    Raises:
        JournalInUse: Another process has not released the journal within ``LOCK_WAIT_S``.
    """
    file = JournalFile._open(path, 0)
    try:
        tail = last_line(file._descriptor)
        if tail.endswith(b"\n"):
            return 0
        os.ftruncate(file._descriptor, os.fstat(file._descriptor).st_size - len(tail))
        os.fsync(file._descriptor)
        return len(tail)
    finally:
        file.close()


class Journal:
    """Appends events to a journal file without blocking the event loop.

    All calls come from one event loop. ``append`` encodes the events at once, in order. A thread writes and
    flushes them in batches, at most ``SYNC_EVERY_S`` and one flush later, or at once if ``durable`` waits for
    them. While the disk is full or fails, events are kept in memory and written again every ``RETRY_S``.
    """

    def __init__(self, file: JournalFile, position: LedgerPosition) -> None:
        self._file = file
        self.position = position
        self._num_durable = position.num_lines
        self._pending: list[bytes] = []
        self._oldest_s = 0.0
        self._failure: Exception | None = None
        self._writing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self.refusal: Refusal | None = None
        """Reason why the disk does not accept writes, while they are retried; None otherwise."""
        self._monitor = Monitor(self)
        self._longest_behind_s = 0.0

    def append(self, events: Sequence[AnyEvent]) -> None:
        """Append events. Returns before they are on disk; see ``durable``.

        Raises:
            JournalNotWritten: Earlier events could not be written, for a reason that a retry cannot remove.
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
        """Wait until all events appended so far are on disk.

        Raises:
            JournalNotWritten: They could not be written, for a reason that a retry cannot remove.
        """
        num_lines = self.position.num_lines
        self._hurry.set()
        await self._monitor.until(
            lambda journal: journal._num_durable >= num_lines or journal._failure is not None
        )
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Write the remaining events, and close the file.

        Raises:
            JournalNotWritten: They could not be written, for a reason that a retry cannot remove.
        """
        await self.durable()
        self._file.close()

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl.

        ``ledger/behind_s`` is the longest time since the last call that an event waited to be on disk.
        """
        longest_s, self._longest_behind_s = self._longest_behind_s, 0.0
        return {"ledger/num_events": self.position.num_lines, "ledger/behind_s": longest_s}

    async def _write(self) -> None:
        """Write batches of events until none is pending."""
        try:
            while self._pending:
                try:
                    await asyncio.wait_for(self._hurry.wait(), SYNC_EVERY_S)
                except TimeoutError:
                    # No call of durable waits, and the time to collect more events is over.
                    pass
                self._hurry.clear()
                data, oldest_s, num_lines = b"".join(self._pending), self._oldest_s, self.position.num_lines
                self._pending.clear()
                await self._until_written(data)
                self._longest_behind_s = max(self._longest_behind_s, time.monotonic() - oldest_s)
                self._num_durable = num_lines
                self._monitor.wake()
        except Exception as error:
            # The next call of append or durable raises it.
            self._failure = error
            self._monitor.wake()
        finally:
            self._writing = None

    async def _until_written(self, data: bytes) -> None:
        while True:
            try:
                await asyncio.to_thread(self._file.write, data)
            except JournalNotWritten as error:
                if not is_refusal(error):
                    raise
                # The file object keeps the data and writes them with the next call.
                data = b""
                self.refusal = Refusal(path=str(self._file.path), reason=error.strerror or str(error))
                await asyncio.sleep(RETRY_S)
            else:
                self.refusal = None
                return


class RunHasEnded(RuntimeError):
    """The buffer was called after ``end``, by a loop that is being cancelled."""


class JournaledBuffer(Monitor[ReplayBuffer]):
    """A ``ReplayBuffer`` that the tasks of one event loop share; every event is written to a journal.

    The collecting loop waits until the bounds let a group start, the training loop for a batch. Other changes
    of the buffer wake them.
    """

    def __init__(self, state: ReplayBuffer, journal: Journal) -> None:
        super().__init__(state)
        self._journal = journal
        self._is_ended = False

    def change(self, act: Callable[[ReplayBuffer], T]) -> T:
        """Call ``act`` on the buffer, append its events to the journal, and wake waiting tasks."""
        self._refuse_after_end()
        result = super().change(act)
        self._journal.append(self.state.take_events())
        return result

    async def until(
        self,
        attempt: Callable[[ReplayBuffer], T | None],
        *,
        look_at_s: Callable[[ReplayBuffer], float | None] = lambda state: None,
    ) -> T:
        """Wait until ``attempt`` succeeds, and append its events to the journal. See ``Monitor.until``."""
        self._refuse_after_end()
        result = await super().until(attempt, look_at_s=look_at_s)
        self._journal.append(self.state.take_events())
        return result

    async def checkpoint(self) -> CheckpointedBuffer:
        """Return the buffer's part of a checkpoint, once the ledger up to it is on disk."""
        snapshot = self.state.snapshot()
        self._journal.append([Checkpointed(step=snapshot.trainer_version)])
        position = self._journal.position
        await self._journal.durable()
        return CheckpointedBuffer(snapshot=snapshot, ledger=position)

    async def durable(self) -> dict[str, float]:
        """Wait until all events so far are on disk, and return the journal's metrics."""
        metrics = self._journal.metrics()
        await self._journal.durable()
        return metrics

    @property
    def refusal(self) -> Refusal | None:
        """Reason why the ledger's disk does not accept writes, while they are retried; None otherwise."""
        return self._journal.refusal

    async def end(self) -> None:
        """End the ledger after the last step, and close it. Prompts that have not ended are unfinished."""
        self._refuse_after_end()
        self._is_ended = True
        left = self.state.snapshot()
        unfinished = (one.submission_id for one in (*left.started, *left.complete, *left.pending))
        self._journal.append([Ended(unfinished=tuple(sorted(unfinished)))])
        await self._journal.close()

    def _refuse_after_end(self) -> None:
        if self._is_ended:
            raise RunHasEnded("the run has ended; its prompts are accounted for")


def open_buffer(
    state: ReplayBuffer, file: Path, config: RunConfig, resumed: ResumedBuffer | None
) -> JournaledBuffer:
    """Create the ledger of a run, or continue it, and return the buffer that writes to it.

    A resumed run whose folder has no ledger begins one at its step.

    Args:
        state: A new buffer, or one restored from ``resumed``.
        file: Path of the ledger. Remove an incomplete last line first, with ``cut_torn_line``.
        config: The run's config.
        resumed: The buffer's part of the checkpoint, if the run is resumed.

    Raises:
        FileExistsError: The folder of a new run has a ledger.
        JournalInUse: Another process writes the ledger.
        ValueError: The last line of the existing ledger is not a complete line of a ledger.
    """
    groups_per_step = config.algorithm.groups_per_step
    if resumed is not None and file.exists():
        opened, position = JournalFile.reopen(file)
        event: Resumed | Opened = Resumed(
            step=resumed.checkpointed.snapshot.trainer_version,
            line=resumed.checkpointed.ledger.num_lines,
            groups_per_step=groups_per_step,
            batches=resumed.batches,
        )
    else:
        opened, position = JournalFile.create(file), START
        now = state.snapshot()
        event = Opened(
            format=FORMAT,
            run=config.name,
            seed=config.seed,
            groups_per_step=groups_per_step,
            step=now.trainer_version,
            next_group=now.next_group_id,
            num_submitted=now.num_submitted,
            waiting=tuple((one.submission_id, one.attempt) for one in now.pending),
        )
    journal = Journal(opened, position)
    journal.append([event])
    return JournaledBuffer(state, journal)
