"""What a game is to the environment that plays it with the model."""

import re
from dataclasses import dataclass
from typing import Protocol

MAX_MOVE_CHARACTERS = 40

MAX_READ_CHARACTERS = 20_000
"""Only the end of a turn is searched for a move."""

_MOVE = re.compile(r"\[([^\[\]\n]{1,40})\]")

HOW_TO_MOVE = "Write your move in square brackets"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a game answers to a move."""

    text: str
    is_legal: bool = True
    """An illegal move has changed nothing."""
    is_over: bool = False
    value: float = 0.0
    """What the game was worth, from 0 to 1, once it is over."""


class Game(Protocol):
    """One game under way; what it does follows from its section, its seed and the moves."""

    @property
    def opening(self) -> str:
        """The rules and how the game stands before the first move."""
        ...

    def play(self, move: str) -> Reply:
        """Make a move, which is up to ``MAX_MOVE_CHARACTERS`` of any text."""
        ...


def read_move(text: str) -> str | None:
    """Return the last text in square brackets on one line, without white space at its edges; None without
    any."""
    found = _MOVE.findall(text[-MAX_READ_CHARACTERS:])
    return found[-1].strip() if found else None
