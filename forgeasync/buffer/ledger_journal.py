"""The journal of a run: its file, the writer beside the event loop, and a replay buffer that keeps one.

The ledger is written where the buffer changes, by the buffer's own process, so that events are in order and
are sent nowhere. The disk may be behind by ``SYNC_EVERY_S`` and a flush, with two exceptions. A checkpoint
begins only when the ledger up to it is on the disk. The metrics of a step are reported only when the step is.
"""

import asyncio
import functools
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
from forgeasync.buffer.replay_buffer import AsyncReplayBuffer, ReplayBuffer
from forgeasync.config import RunConfig
from forgeasync.files import AppendedFile, FileLocked, Refusal, flush, is_refusal, last_line, lock
from forgeasync.waiting import Monitor

LOCK_WAIT_S = 10.0
"""Seconds to wait for the process that wrote the journal of a killed run, which ends after its controller."""

SYNC_EVERY_S = 0.2
"""Seconds in which events are collected before they are written. If the machine fails, only these and those
that are being written are lost."""

RETRY_S = 1.0
"""Seconds between two attempts to write what the disk has refused."""

T = TypeVar("T")


class JournalNotWritten(OSError):
    """The journal could not be written."""


class JournalInUse(RuntimeError):
    """Another process writes the journal."""


class JournalFile:
    """An open journal file, locked by the one process that appends to it. Nothing is rewritten."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._file = AppendedFile(descriptor, is_flushed=True)

    @classmethod
    def create(cls, path: Path) -> "JournalFile":
        """Create a journal.

        Raises:
            FileExistsError: it exists.
        """
        file = cls._open(path, os.O_CREAT | os.O_EXCL)
        flush(path.parent)
        return file

    @classmethod
    def reopen(cls, path: Path) -> "tuple[JournalFile, LedgerPosition]":
        """Open a journal to go on with it; also returns the position of its end.

        Raises:
            ValueError: its last line is not a complete line of a ledger.
            JournalInUse: another process still writes it.
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
            # On a file system without locks, one controller has still claimed the run's folder.
            lock(descriptor, wait_s=LOCK_WAIT_S)
        except FileLocked:
            os.close(descriptor)
            raise JournalInUse(
                f"{path}: another process writes this ledger; end it first (a run that goes on, or what "
                "is left of one that was killed)"
            ) from None
        return cls(path, descriptor)

    def write(self, data: bytes) -> None:
        """Append ``data`` and wait until it is on the disk.

        After an error the file ends as before. The data are kept, and the next call writes them first; it may
        have nothing to add.

        Raises:
            JournalNotWritten: the disk is full or fails.
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
    """Remove an incomplete last line, which a killed process left; returns its number of bytes.

    Raises:
        JournalInUse: another process still writes the journal.
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
    """Appends events to a journal without blocking the event loop that makes all calls.

    Events get their lines at once, in order. A thread writes and flushes them in batches, at most
    ``SYNC_EVERY_S`` and one flush later, or at once if something waits for them. While the disk is full or
    fails they are kept and tried again, and waiting takes longer.
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
        self._refusal: Refusal | None = None
        self._monitor = Monitor(self)
        self._longest_behind_s = 0.0

    def append(self, events: Sequence[AnyEvent]) -> None:
        """Append events, which are on the disk a moment later.

        Raises:
            JournalNotWritten: an earlier event can never be written.
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
        """Wait until everything that was appended is on the disk.

        Raises:
            JournalNotWritten: it can never be written.
        """
        num_lines = self.position.num_lines
        self._hurry.set()
        await self._monitor.until(
            lambda journal: journal._num_durable >= num_lines or journal._failure is not None
        )
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Write what remains, and close the file.

        Raises:
            JournalNotWritten: it can never be written.
        """
        await self.durable()
        self._file.close()

    @property
    def refusal(self) -> Refusal | None:
        """What the disk refuses at this moment, for which ``durable`` waits."""
        return self._refusal

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl. The delay is the longest since the last call."""
        longest_s, self._longest_behind_s = self._longest_behind_s, 0.0
        return {"ledger/num_events": self.position.num_lines, "ledger/behind_s": longest_s}

    async def _write(self) -> None:
        """Write until nothing is pending."""
        try:
            while self._pending:
                try:
                    await asyncio.wait_for(self._hurry.wait(), SYNC_EVERY_S)
                except TimeoutError:
                    # Nothing waits for these events, and the time to collect more is over.
                    pass
                self._hurry.clear()
                data, oldest_s, num_lines = b"".join(self._pending), self._oldest_s, self.position.num_lines
                self._pending.clear()
                await self._until_written(data)
                self._longest_behind_s = max(self._longest_behind_s, time.monotonic() - oldest_s)
                self._monitor.change(functools.partial(Journal._set_durable, num_lines=num_lines))
        except Exception as error:
            # The next call that appends or waits raises it.
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
                # The file keeps the data.
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


class RunHasEnded(RuntimeError):
    """A call came after the end of the ledger, from a loop that is being cancelled."""


class JournaledBuffer(AsyncReplayBuffer):
    """An ``AsyncReplayBuffer`` that writes every change into a journal."""

    def __init__(self, state: ReplayBuffer, journal: Journal) -> None:
        super().__init__(state)
        self._journal = journal
        self._is_ended = False

    def change(self, act: Callable[[ReplayBuffer], T]) -> T:
        """Call ``act``, write its events, and wake what waits."""
        self._refuse_after_end()
        result = super().change(act)
        self._journal.append(self.state.events.take())
        return result

    async def until(
        self,
        attempt: Callable[[ReplayBuffer], T | None],
        *,
        look_at_s: Callable[[ReplayBuffer], float | None] = lambda state: None,
    ) -> T:
        """Wait for an attempt to succeed, and write its events."""
        self._refuse_after_end()
        result = await super().until(attempt, look_at_s=look_at_s)
        self._journal.append(self.state.events.take())
        return result

    async def checkpoint(self) -> CheckpointedBuffer:
        """Return the buffer's part of a checkpoint, when the ledger up to here is on the disk."""
        snapshot = self.state.snapshot()
        self._journal.append([Checkpointed(step=snapshot.trainer_version)])
        position = self._journal.position
        await self._journal.durable()
        return CheckpointedBuffer(snapshot=snapshot, ledger=position)

    async def durable(self) -> dict[str, float]:
        """Wait until everything that has happened is on the disk; returns the journal's metrics."""
        metrics = self._journal.metrics()
        await self._journal.durable()
        return metrics

    @property
    def refusal(self) -> Refusal | None:
        """What the ledger's disk refuses at this moment."""
        return self._journal.refusal

    async def end(self) -> None:
        """End the ledger after the last step. All prompts that have not ended are unfinished."""
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
    """Begin the ledger of a run, or go on with it. A resumed run without a ledger begins one at its step.

    ``state`` is new, or restored from ``resumed``. An incomplete last line has been removed before.

    Raises:
        FileExistsError: the folder of a new run has a ledger.
        JournalInUse: another process writes it.
        ValueError: the last line of the ledger to go on with is not a line of a ledger.
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
