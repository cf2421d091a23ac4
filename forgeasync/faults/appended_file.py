"""A file that is appended to on a disk that may be full, or fail, for a while."""

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors after which the same write can succeed later."""


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that the disk is full or fails, so that the same write can succeed later."""
    return isinstance(error, OSError) and error.errno in REFUSALS


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a disk refuses at this moment."""

    path: str
    reason: str


class AppendedFile:
    """A file that one process appends to. It ends with a whole ``write`` whenever the disk has refused one.

    What was not written is kept. The next call writes it first, from the byte where the file ended, so that
    nothing is lost and nothing is there twice. After a failed flush that is everything since the last one
    that succeeded: Linux then takes pages for written that are not.
    """

    def __init__(self, descriptor: int, *, is_flushed: bool) -> None:
        """Append to a file that is open for writing, without O_APPEND; ``is_flushed``: each write is on the
        disk when it returns."""
        self._descriptor = descriptor
        self._is_flushed = is_flushed
        self._end = os.lseek(descriptor, 0, os.SEEK_END)
        self._kept = b""

    @classmethod
    def open(cls, path: Path) -> "AppendedFile":
        """Open a file, or begin it. What is written stays when the process is killed."""
        return cls(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), is_flushed=False)

    @property
    def num_kept_bytes(self) -> int:
        """Bytes that the disk has refused so far."""
        return len(self._kept)

    def write(self, data: bytes) -> None:
        """Append what was kept, and ``data``.

        Raises:
            OSError: the disk has refused; all of it is kept, and the file ends as before.
        """
        self._kept += data
        left, position = memoryview(self._kept), self._end
        try:
            while left:
                num_written = os.pwrite(self._descriptor, left, position)
                left, position = left[num_written:], position + num_written
            if self._is_flushed:
                os.fsync(self._descriptor)
        except OSError:
            # Half a line must not stay. Where even that fails, the next call writes over it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end, self._kept = position, b""

    def close(self) -> None:
        """Close the file; what was kept is gone."""
        os.close(self._descriptor)
