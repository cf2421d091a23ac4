"""Reads the lines of a ledger as they come, past those that are damaged."""

from forgeasync.ledger import FORMAT, START, BadLine, LedgerPosition, Opened, decode_line, position_after
from forgeasync.viewer.appended_lines import Piece
from forgeasync.viewer.group_lives import GroupLives


class LedgerLines:
    """The groups of all lines so far.

    A line's checksum holds for the line before it too. So a line that is altered is left out, and where one
    is no line at all, the one behind it as well.
    """

    def __init__(self) -> None:
        self.lives = GroupLives()
        self.num_damaged = 0
        """Lines that were left out."""
        self.first_damage: str | None = None
        """What is wrong with the first of them."""
        self.refusal: str | None = None
        """Why nothing is read of this ledger: it is of another format."""
        self._position = START

    def add(self, piece: Piece) -> None:
        """Take the next lines."""
        offset = piece.start
        for line in piece.lines():
            if self.refusal is not None:
                return
            self._add_line(line, offset)
            offset += len(line) + 1

    def _add_line(self, line: bytes, offset: int) -> None:
        try:
            event, self._position = decode_line(line, self._position)
        except BadLine as error:
            self.num_damaged += 1
            number = self._position.num_lines + 1
            self.first_damage = self.first_damage or f"line {number} {error}"
            self._position = position_after(line) or LedgerPosition(num_lines=number, checksum=0)
            return
        if isinstance(event, Opened) and event.format != FORMAT:
            self.refusal = f"has format {event.format}; this version of forgeasync reads {FORMAT}"
            return
        self.lives.apply(event, line=self._position.num_lines, offset=offset)
