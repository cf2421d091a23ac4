"""Follows files to which another process appends lines."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

PIECE_BYTES = 1 << 19
"""Maximum number of bytes of one read, unless a single line is longer."""

MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line; lines of a run are much shorter."""

_NUM_REMEMBERED_BYTES = 256


class Contents(Protocol):
    """Parsed contents of one file's lines."""

    def add(self, line: bytes, offset: int) -> None:
        """Add the next line, without its newline, and its offset in the file."""


C = TypeVar("C", bound=Contents)


class FollowedFile(Generic[C]):
    """A file to which another process appends lines, with the contents of its lines so far.

    It need not exist, and is read from its start if it was replaced or truncated. A last line without a
    newline is incomplete: it is still being written, or a crash cut it. It is read once it is complete.
    """

    def __init__(
        self,
        path: Path,
        new: Callable[[], C],
        *,
        piece_bytes: int = PIECE_BYTES,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        """``new`` creates empty contents."""
        self.path = path
        self.contents = new()
        self.problem: str | None = None
        """Why the last read did not get further; None if it did, or if there is no file."""
        self.position = 0
        """Number of bytes read so far."""
        self._new = new
        self._piece_bytes = piece_bytes
        self._max_line_bytes = max_line_bytes
        self._file_number: tuple[int, int] | None = None
        self._remembered = b""
        """The bytes before the position. If they change, the file was replaced."""

    @property
    def num_unread_bytes(self) -> int:
        """Number of bytes after the position: more lines, or an incomplete one."""
        try:
            return max(0, self.path.stat().st_size - self.position)
        except OSError:
            return 0

    def read_some(self) -> bool:
        """Read a piece; return whether the contents have changed."""
        self.problem = None
        try:
            with self.path.open("rb") as file:
                return self._read(file.fileno())
        except FileNotFoundError:
            return self._restart()
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
            return False

    def _restart(self) -> bool:
        """Drop the contents; return whether there were any."""
        had_contents = self.position > 0
        if had_contents:
            self.contents, self.position, self._remembered = self._new(), 0, b""
        return had_contents

    def _read(self, descriptor: int) -> bool:
        status = os.fstat(descriptor)
        number = (status.st_dev, status.st_ino)
        place = self.position - len(self._remembered)
        is_same = number == self._file_number and status.st_size >= self.position
        is_same = is_same and os.pread(descriptor, len(self._remembered), place) == self._remembered
        has_changed = not is_same and self._restart()
        self._file_number = number
        if data := self._whole_lines(descriptor):
            for line in data.split(b"\n")[:-1]:
                self.contents.add(line, self.position)
                self.position += len(line) + 1
            place = max(0, self.position - _NUM_REMEMBERED_BYTES)
            self._remembered = os.pread(descriptor, self.position - place, place)
            has_changed = True
        return has_changed

    def _whole_lines(self, descriptor: int) -> bytes:
        wanted = self._piece_bytes
        while True:
            data = os.pread(descriptor, wanted, self.position)
            if end := data.rfind(b"\n") + 1:
                return data[:end]
            if len(data) < wanted:
                return b""
            if wanted >= self._max_line_bytes:
                self.problem = f"{self.path.name}: a line is too long, and is not read with what follows it"
                return b""
            wanted = min(2 * wanted, self._max_line_bytes)


class LineUnreadable(ValueError):
    """A line cannot be read; the text has the reason."""


def read_record(file: Path, offset: int) -> dict[str, Any]:
    """Read the JSON object of the line that begins at an offset.

    Raises:
        LineUnreadable: the file cannot be read, or no JSON object begins there.
    """
    try:
        with file.open("rb") as lines:
            lines.seek(offset)
            # Like the run's encoder, this decoder accepts lone surrogates in texts, which others refuse.
            record = json.loads(lines.readline(MAX_LINE_BYTES))
    except OSError as error:
        raise LineUnreadable(f"{file.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise LineUnreadable(f"{file.name} has changed: a line is not at its offset ({error})") from None
    if not isinstance(record, dict):
        raise LineUnreadable(f"{file.name} has changed: a line is not at its offset")
    return record
