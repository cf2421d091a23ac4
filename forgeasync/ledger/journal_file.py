"""The file of a journal: appended to by one process at a time, never rewritten."""

import os
from pathlib import Path

from forgeasync.faults import AppendedFile, FileLocked, lock
from forgeasync.ledger.lines import START, LedgerPosition, position_after

LOCK_WAIT_S = 10.0
"""Time for the process that wrote the journal of a killed run to end, a moment after its controller."""

_CHUNK_BYTES = 1 << 16


class JournalNotWritten(OSError):
    """The journal's file refused what was to be written."""


class JournalInUse(RuntimeError):
    """Another process writes the journal."""


class JournalFile:
    """An open journal, locked for this process as long as it is open."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._file = AppendedFile(descriptor, is_flushed=True)

    @classmethod
    def create(cls, path: Path) -> "JournalFile":
        """Begin a journal.

        Raises:
            FileExistsError: there is one already.
        """
        file = cls._open(path, os.O_CREAT | os.O_EXCL)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return file

    @classmethod
    def reopen(cls, path: Path) -> "tuple[JournalFile, LedgerPosition]":
        """Go on with a journal whose last line is whole; also return its end.

        Raises:
            ValueError: its last line is not whole, or no line of a ledger.
            JournalInUse: another process still writes it.
        """
        file = cls._open(path, 0)
        size = os.fstat(file._descriptor).st_size
        tail = _last_line(file._descriptor, size)
        position = START if size == 0 else position_after(tail.removesuffix(b"\n"))
        if position is None or (size and not tail.endswith(b"\n")):
            file.close()
            raise ValueError(f"{path}: the last line is not a whole line of a ledger; run apps.verify on it")
        return file, position

    @classmethod
    def _open(cls, path: Path, flags: int) -> "JournalFile":
        descriptor = os.open(path, os.O_RDWR | flags, 0o644)
        try:
            # Where its file system has no locks, the run's folder is claimed by one controller anyway.
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

        What could not be written is kept, and is written first by the next call. After an error the file ends
        as before, and the same call with nothing more to add goes on from there.

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
        """Close the file, which another process may then write."""
        self._file.close()


def cut_torn_line(path: Path) -> int:
    """Remove the beginning of a line that a killed process left at the end; returns its number of bytes.

    Raises:
        JournalInUse: another process still writes the journal.
    """
    file = JournalFile._open(path, 0)
    try:
        size = os.fstat(file._descriptor).st_size
        tail = _last_line(file._descriptor, size)
        if tail.endswith(b"\n"):
            return 0
        os.ftruncate(file._descriptor, size - len(tail))
        os.fsync(file._descriptor)
        return len(tail)
    finally:
        file.close()


def _last_line(descriptor: int, size: int) -> bytes:
    """Read the last line, with its newline if it has one; reads from the end."""
    tail = b""
    while len(tail) < size and b"\n" not in tail[:-1]:
        num_bytes = min(_CHUNK_BYTES, size - len(tail))
        tail = os.pread(descriptor, num_bytes, size - len(tail) - num_bytes) + tail
    return tail[tail.rfind(b"\n", 0, -1) + 1 :]
