"""The sections on games: which one a source of tasks makes, and how it is played."""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from forgeasync.schema import SHORT_FORM, Section


class GuessNumber(Section):
    """Find a whole number; every guess is answered with "higher" or "lower"."""

    kind: Literal["guess_number"] = "guess_number"
    low: int = Field(default=1, ge=-(10**9), le=10**9)
    high: int = Field(default=100, ge=-(10**9), le=10**9)
    max_guesses: int = Field(default=7, gt=0, le=1000)

    @model_validator(mode="after")
    def _has_a_choice(self) -> Self:
        if self.high <= self.low:
            raise PydanticCustomError(
                "key_of_section",
                "is {high}; must be greater than low = {low}",
                {"key": "high", "high": self.high, "low": self.low},
            )
        return self


class Opponent(StrEnum):
    """How the other side plays."""

    RANDOM = "random"
    """It draws among its legal moves."""
    PERFECT = "perfect"
    """It never loses, and draws among its best moves."""


class TicTacToe(Section):
    """Three in a row against a scripted opponent; a win is worth 1, a draw 0.5."""

    kind: Literal["tic_tac_toe"] = "tic_tac_toe"
    opponent: Opponent = Opponent.RANDOM


class Maze(Section):
    """Walk through a maze whose map is shown."""

    kind: Literal["maze"] = "maze"
    width: int = Field(default=4, ge=2, le=30)
    """Number of cells from west to east."""
    height: int = Field(default=4, ge=2, le=30)
    """Number of cells from north to south."""
    spare_moves: int = Field(default=10, ge=0, le=10_000)
    """Moves that may be made beyond those of the shortest way."""


GameSection = Annotated[GuessNumber | TicTacToe | Maze, Field(discriminator="kind"), *SHORT_FORM]


class GameSource(Section):
    """Games, each drawn from a seed of its own; needs ``environment: {kind: game}`` or one of your own, which
    finds the game in ``task.record``."""

    kind: Literal["game"]
    game: GameSection
