"""Finding a number by guesses that are answered with "higher" or "lower"."""

import random
import re

from forgeasync.config import GuessNumber
from forgeasync.environments.games.game import HOW_TO_MOVE, Reply

# At most as many digits as the bounds of the section have.
_NUMBER = re.compile(r"-?\d{1,10}", re.ASCII)


class GuessNumberGame:
    """One number to find; worth 1 if it is found in time."""

    def __init__(self, section: GuessNumber, seed: int) -> None:
        self._section = section
        self._number = random.Random(seed).randint(section.low, section.high)
        self._num_left = section.max_guesses

    @property
    def opening(self) -> str:
        section = self._section
        return (
            f"I have chosen a whole number from {section.low} to {section.high}. Find it in at most "
            f"{section.max_guesses} guesses; after each I say whether my number is higher or lower. "
            f"{HOW_TO_MOVE}, such as [{(section.low + section.high) // 2}]."
        )

    def play(self, move: str) -> Reply:
        section = self._section
        guess = int(move) if _NUMBER.fullmatch(move) else None
        if guess is None or not section.low <= guess <= section.high:
            return Reply(
                text=f"That is no whole number from {section.low} to {section.high}.", is_legal=False
            )
        self._num_left -= 1
        if guess == self._number:
            return Reply(text=f"Yes, {guess} is my number.", is_over=True, value=1.0)
        if not self._num_left:
            return Reply(text="That was your last guess, and it is wrong.", is_over=True)
        hint = "higher" if self._number > guess else "lower"
        return Reply(text=f"My number is {hint} than {guess}. Guesses left: {self._num_left}.")
