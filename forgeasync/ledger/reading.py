"""Reads ledgers: line by line while a file grows, or a whole file up to the first contradiction."""

from dataclasses import dataclass
from pathlib import Path

from forgeasync.ledger.account import Contradiction
from forgeasync.ledger.book import Book
from forgeasync.ledger.lines import (
    FORMAT,
    START,
    AnyEvent,
    BadLine,
    LedgerPosition,
    Opened,
    decode_line,
    position_after,
)


class LedgerUnreadable(ValueError):
    """There is no ledger, or nothing can be read of it."""


class LedgerLines:
    """Decodes the lines of one ledger in their order. Keep one to follow a ledger that is being written."""

    def __init__(self, name: str) -> None:
        """``name`` is the file's name in error messages."""
        self.position = START
        """The end of the last line that was read or skipped."""
        self._name = name

    def read(self, line: bytes) -> AnyEvent:
        """Return the event of the next line, which is given without its newline.

        Raises:
            BadLine: it is not the line that was written there. To go on behind it, call ``skip``.
            LedgerUnreadable: it is the first line of a ledger of another format.
        """
        event, position = decode_line(line, self.position)
        if position.num_lines == 1 and isinstance(event, Opened) and event.format != FORMAT:
            raise LedgerUnreadable(
                f"{self._name} has format {event.format}; this version of forgeasync reads {FORMAT}"
            )
        self.position = position
        return event

    def skip(self, line: bytes) -> None:
        """Go on behind a bad line, from the number and the checksum that it claims to have.

        A line without them costs the next line too, because a checksum also covers the line before.
        """
        unknown = LedgerPosition(num_lines=self.position.num_lines + 1, checksum=0)
        self.position = position_after(line) or unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReading:
    """A ledger as far as it could be read."""

    book: Book
    position: LedgerPosition
    """The end of the last line that was read."""
    contradiction: Contradiction | None
    """The first one, if there is any: what follows it was not read."""
    num_torn_bytes: int
    """Length of a last line that was not written to its end, as by a process that was killed."""
    checksum_at: int | None
    """Checksum of the line that was asked for; None if the ledger has no such line."""


def read_ledger(file: Path, *, line: int = 0) -> LedgerReading:
    """Read a whole ledger. ``line`` is one whose checksum is wanted.

    Raises:
        LedgerUnreadable: there is no such file, it has no whole line, or it is of another format.
    """
    book, decoder = Book(), LedgerLines(str(file))
    contradiction, num_torn_bytes, checksum_at = None, 0, None
    try:
        with file.open("rb") as lines:
            for text in lines:
                if not text.endswith(b"\n"):
                    num_torn_bytes = len(text)
                    break
                try:
                    book.apply(decoder.read(text[:-1]))
                except BadLine as error:
                    contradiction = Contradiction(decoder.position.num_lines + 1, str(error))
                    break
                except Contradiction as error:
                    contradiction = error
                    break
                if decoder.position.num_lines == line:
                    checksum_at = decoder.position.checksum
    except OSError as error:
        raise LedgerUnreadable(f"{file} cannot be read: {error.strerror}") from None
    if decoder.position == START and contradiction is None:
        what = f"has only the beginning of a line ({num_torn_bytes} bytes)" if num_torn_bytes else "is empty"
        raise LedgerUnreadable(f"{file} {what}")
    return LedgerReading(
        book=book,
        position=decoder.position,
        contradiction=contradiction,
        num_torn_bytes=num_torn_bytes,
        checksum_at=checksum_at,
    )
