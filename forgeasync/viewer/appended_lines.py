"""Reads a file that another process appends lines to, each time from where the last read ended."""

import os
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 1 << 19
"""Most bytes that are returned at once, unless a single line is longer."""

MAX_LINE_BYTES = 64 << 20
"""Longer lines are passed over: nothing that a run writes comes near."""

_NUM_REMEMBERED_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Whole lines of a file with their newlines; none within a line that is too long."""

    data: bytes
    start: int
    """Place of the first byte in the file."""
    is_anew: bool
    """What was read before is no longer there: the file was replaced or cut. ``data`` may be empty then."""
    num_overlong: int = 0
    """Lines before ``data`` that were passed over, being too long."""

    def lines(self) -> list[bytes]:
        """The lines without their newlines."""
        return self.data.split(b"\n")[:-1]


class AppendedLines:
    """A place in a file. Reads only; the file need not exist, and may be replaced or cut at any time.

    A last line without a newline is being written at this moment, or was cut by a crash: it is not returned
    until it is finished.
    """

    def __init__(
        self, path: Path, *, piece_bytes: int = PIECE_BYTES, max_line_bytes: int = MAX_LINE_BYTES
    ) -> None:
        self.path = path
        self._piece_bytes = piece_bytes
        self._max_line_bytes = max_line_bytes
        self.problem: str | None = None
        """Why the file cannot be read at this moment; None: it can, or is not there."""
        self._position = 0
        self._file_number: tuple[int, int] | None = None
        self._remembered = b""
        """What stands before the position, to notice that the file is another one."""
        self._is_in_overlong = False

    @property
    def position(self) -> int:
        """Bytes from the beginning that were read."""
        return self._position

    @property
    def num_unread_bytes(self) -> int:
        """Bytes behind the place at this moment: more lines, or one that is not finished."""
        try:
            return max(0, self.path.stat().st_size - self._position)
        except OSError:
            return 0

    def read(self) -> Piece | None:
        """Return the next lines; None where there is nothing new."""
        self.problem = None
        try:
            with self.path.open("rb") as file:
                return self._read(file.fileno())
        except FileNotFoundError:
            return self._begin_anew() if self._position else None
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
            return None

    def _begin_anew(self) -> Piece:
        self._position, self._file_number, self._remembered = 0, None, b""
        self._is_in_overlong = False
        return Piece(data=b"", start=0, is_anew=True)

    def _read(self, descriptor: int) -> Piece | None:
        status = os.fstat(descriptor)
        number = (status.st_dev, status.st_ino)
        is_anew = self._position > 0 and not self._goes_on(descriptor, number, status.st_size)
        if is_anew:
            self._begin_anew()
        self._file_number = number
        start, num_overlong = self._position, 0
        data, end = self._whole_lines(descriptor, start)
        if not data and end - start >= self._max_line_bytes:
            self._is_in_overlong = True
        elif self._is_in_overlong and data:
            # The rest of the line that was too long.
            cut = data.index(b"\n") + 1
            data, start, num_overlong = data[cut:], start + cut, 1
            self._is_in_overlong = False
        is_further = end > self._position
        if is_further:
            self._remember(descriptor, end)
        if not (is_further or is_anew):
            return None
        return Piece(data=data, start=start, is_anew=is_anew, num_overlong=num_overlong)

    def _goes_on(self, descriptor: int, number: tuple[int, int], size: int) -> bool:
        if number != self._file_number or size < self._position:
            return False
        place = self._position - len(self._remembered)
        return os.pread(descriptor, len(self._remembered), place) == self._remembered

    def _whole_lines(self, descriptor: int, start: int) -> tuple[bytes, int]:
        """Return lines and where they end; of one that is too long, nothing and how far it was read."""
        data, wanted = b"", self._piece_bytes
        while True:
            data += os.pread(descriptor, wanted - len(data), start + len(data))
            if end := data.rfind(b"\n") + 1:
                return data[:end], start + end
            if len(data) < wanted:
                # The file ends within a line.
                return b"", start + len(data) if self._is_in_overlong else start
            if wanted >= self._max_line_bytes:
                return b"", start + len(data)
            wanted = min(2 * wanted, self._max_line_bytes)

    def _remember(self, descriptor: int, end: int) -> None:
        self._position = end
        place = max(0, end - _NUM_REMEMBERED_BYTES)
        self._remembered = os.pread(descriptor, end - place, place)
