"""Follows files to which another process appends lines; all readers of this plug-in use it."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

PIECE_BYTES = 1 << 19
"""Maximum number of bytes of one read, unless a single line is longer."""

MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line; longer lines are skipped. Lines of a run are much shorter."""

_NUM_REMEMBERED_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Whole lines of a file with their newlines; skipped lines come before or after them, never between."""

    data: bytes
    start: int
    """Offset of the first byte in the file."""
    is_restart: bool
    """Whether the file was replaced or truncated, so that earlier data is invalid. ``data`` may be empty."""
    num_too_long: int = 0
    """Number of lines before ``data`` that were skipped because they are too long."""

    def lines(self) -> list[bytes]:
        """Return the lines without their newlines."""
        return self.data.split(b"\n")[:-1]


class AppendedLines:
    """A position in a file, which need not exist and may be replaced or truncated at any time.

    A last line without a newline is incomplete: it is still being written, or a crash cut it. It is returned
    once it is complete.
    """

    def __init__(
        self, path: Path, *, piece_bytes: int = PIECE_BYTES, max_line_bytes: int = MAX_LINE_BYTES
    ) -> None:
        self.path = path
        self._piece_bytes = piece_bytes
        self._max_line_bytes = max_line_bytes
        self.problem: str | None = None
        """Error of the last read; None if it succeeded or there is no file."""
        self._position = 0
        self._file_number: tuple[int, int] | None = None
        self._remembered = b""
        """The bytes before the position. If they change, the file was replaced."""
        self._is_in_long_line = False

    @property
    def position(self) -> int:
        """Number of bytes read so far."""
        return self._position

    @property
    def num_unread_bytes(self) -> int:
        """Number of bytes after the position: more lines, or an incomplete one."""
        try:
            return max(0, self.path.stat().st_size - self._position)
        except OSError:
            return 0

    def read(self) -> Piece | None:
        """Return the next lines, or None if there is nothing new."""
        self.problem = None
        try:
            with self.path.open("rb") as file:
                return self._read(file.fileno())
        except FileNotFoundError:
            return self._restart() if self._position else None
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
            return None

    def _restart(self) -> Piece:
        self._position, self._file_number, self._remembered = 0, None, b""
        self._is_in_long_line = False
        return Piece(data=b"", start=0, is_restart=True)

    def _read(self, descriptor: int) -> Piece | None:
        status = os.fstat(descriptor)
        number = (status.st_dev, status.st_ino)
        is_restart = self._position > 0 and not self._is_same_file(descriptor, number, status.st_size)
        if is_restart:
            self._restart()
        self._file_number = number
        start, num_too_long = self._position, 0
        data, end = self._whole_lines(descriptor, start)
        if not data and end - start >= self._max_line_bytes:
            self._is_in_long_line = True
        elif self._is_in_long_line and data:
            # This is the end of the line that is too long.
            cut = data.index(b"\n") + 1
            data, start, num_too_long = data[cut:], start + cut, 1
            self._is_in_long_line = False
        is_further = end > self._position
        if is_further:
            self._remember(descriptor, end)
        if not (is_further or is_restart):
            return None
        return Piece(data=data, start=start, is_restart=is_restart, num_too_long=num_too_long)

    def _is_same_file(self, descriptor: int, number: tuple[int, int], size: int) -> bool:
        if number != self._file_number or size < self._position:
            return False
        place = self._position - len(self._remembered)
        return os.pread(descriptor, len(self._remembered), place) == self._remembered

    def _whole_lines(self, descriptor: int, start: int) -> tuple[bytes, int]:
        """Return lines and their end's offset; if a line is too long, none and the offset read so far."""
        data, wanted = b"", self._piece_bytes
        while True:
            data += os.pread(descriptor, wanted - len(data), start + len(data))
            if end := data.rfind(b"\n") + 1:
                return data[:end], start + end
            if len(data) < wanted:
                # The file ends within a line.
                return b"", start + len(data) if self._is_in_long_line else start
            if wanted >= self._max_line_bytes:
                return b"", start + len(data)
            wanted = min(2 * wanted, self._max_line_bytes)

    def _remember(self, descriptor: int, end: int) -> None:
        self._position = end
        place = max(0, end - _NUM_REMEMBERED_BYTES)
        self._remembered = os.pread(descriptor, end - place, place)


class Contents(Protocol):
    """Parsed contents of one file's lines."""

    def add(self, piece: Piece) -> None:
        """Add the next lines."""


C = TypeVar("C", bound=Contents)


class FollowedFile(Generic[C]):
    """A file that is being written, with the contents of its lines so far."""

    def __init__(self, path: Path, new: Callable[[], C]) -> None:
        """``new`` creates empty contents; it is called again whenever the file was replaced or truncated."""
        self.lines = AppendedLines(path)
        self.contents = new()
        self.num_too_long = 0
        """Number of lines that were skipped because they are too long."""
        self._new = new

    def read_some(self) -> bool:
        """Read a piece; return whether there was one."""
        piece = self.lines.read()
        if piece is None:
            return False
        if piece.is_restart:
            self.contents, self.num_too_long = self._new(), 0
        self.num_too_long += piece.num_too_long
        self.contents.add(piece)
        return True


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
        raise LineUnreadable(
            f"{file.name} has changed: a line is no longer at its offset ({error})"
        ) from None
    if not isinstance(record, dict):
        raise LineUnreadable(f"{file.name} has changed: a line is no longer at its offset")
    return record
