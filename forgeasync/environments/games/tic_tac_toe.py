"""Three in a row against a scripted opponent."""

import functools
import random

from forgeasync.config import Opponent, TicTacToe
from forgeasync.environments.games.game import HOW_TO_MOVE, Reply

MODEL, OTHER, FREE = "X", "O", "."

_LINES = (
    *((row, row + 1, row + 2) for row in (0, 3, 6)),
    *((column, column + 3, column + 6) for column in (0, 1, 2)),
    (0, 4, 8),
    (2, 4, 6),
)

WIN, DRAW, LOSS = 1.0, 0.5, 0.0


class TicTacToeGame:
    """One game; the seed says who begins and how the opponent draws."""

    def __init__(self, section: TicTacToe, seed: int) -> None:
        self._opponent = section.opponent
        self._rng = random.Random(seed)
        self._board = FREE * 9
        if self._rng.random() < 0.5:
            self._answer()

    @property
    def opening(self) -> str:
        return (
            f"Let us play three in a row. You are {MODEL}, I am {OTHER}, and the fields are numbered 1 to 9, "
            f"row by row. {HOW_TO_MOVE}, such as [5].\n{self._shown()}\nIt is your move."
        )

    def play(self, move: str) -> Reply:
        field = int(move) - 1 if move in tuple("123456789") else None
        if field is None or self._board[field] != FREE:
            return Reply(text=f"That is no free field.\n{self._shown()}", is_legal=False)
        self._board = _with(self._board, field, MODEL)
        if winner(self._board) == MODEL:
            return Reply(text=f"{self._shown()}\nYou have won.", is_over=True, value=WIN)
        if FREE in self._board:
            self._answer()
        if winner(self._board) == OTHER:
            return Reply(text=f"{self._shown()}\nI have won.", is_over=True, value=LOSS)
        if FREE not in self._board:
            return Reply(text=f"{self._shown()}\nIt is a draw.", is_over=True, value=DRAW)
        return Reply(text=f"{self._shown()}\nIt is your move.")

    def _answer(self) -> None:
        fields = free_fields(self._board)
        if self._opponent is Opponent.PERFECT:
            worth = {field: -_worth(_with(self._board, field, OTHER), MODEL) for field in fields}
            fields = [field for field in fields if worth[field] == max(worth.values())]
        self._board = _with(self._board, self._rng.choice(fields), OTHER)

    def _shown(self) -> str:
        return "\n".join(self._board[row : row + 3] for row in (0, 3, 6))


def winner(board: str) -> str | None:
    """Return the mark that has three in a row."""
    for one, two, three in _LINES:
        if board[one] != FREE and board[one] == board[two] == board[three]:
            return board[one]
    return None


def free_fields(board: str) -> list[int]:
    """Return the indices of the free fields, 0 to 8."""
    return [field for field, mark in enumerate(board) if mark == FREE]


@functools.cache
def _worth(board: str, to_move: str) -> int:
    """Return 1, 0 or -1: what the position is worth for the side to move if both play perfectly (negamax)."""
    if winner(board) is not None:
        return -1
    other = OTHER if to_move == MODEL else MODEL
    return max((-_worth(_with(board, field, to_move), other) for field in free_fields(board)), default=0)


def _with(board: str, field: int, mark: str) -> str:
    return board[:field] + mark + board[field + 1 :]
