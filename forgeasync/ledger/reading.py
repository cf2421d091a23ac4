"""Reads a ledger from its file, line by line, up to the first contradiction."""

from dataclasses import dataclass
from pathlib import Path

from forgeasync.ledger.account import Contradiction
from forgeasync.ledger.book import Book
from forgeasync.ledger.lines import FORMAT, START, BadLine, LedgerPosition, Opened, decode_line


class LedgerUnreadable(ValueError):
    """There is no ledger, or nothing can be read of it."""


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
    book, position, contradiction, num_torn_bytes, checksum_at = Book(), START, None, 0, None
    try:
        with file.open("rb") as lines:
            for text in lines:
                if not text.endswith(b"\n"):
                    num_torn_bytes = len(text)
                    break
                try:
                    event, position = decode_line(text[:-1], position)
                    if position.num_lines == 1 and isinstance(event, Opened) and event.format != FORMAT:
                        raise LedgerUnreadable(
                            f"{file} has format {event.format}; this version of forgeasync reads {FORMAT}"
                        )
                    book.apply(event)
                except BadLine as error:
                    contradiction = Contradiction(position.num_lines + 1, str(error))
                    break
                except Contradiction as error:
                    contradiction = error
                    break
                if position.num_lines == line:
                    checksum_at = position.checksum
    except OSError as error:
        raise LedgerUnreadable(f"{file} cannot be read: {error.strerror}") from None
    if position == START and contradiction is None:
        what = f"has only the beginning of a line ({num_torn_bytes} bytes)" if num_torn_bytes else "is empty"
        raise LedgerUnreadable(f"{file} {what}")
    return LedgerReading(
        book=book,
        position=position,
        contradiction=contradiction,
        num_torn_bytes=num_torn_bytes,
        checksum_at=checksum_at,
    )
