"""Compares the end of a model's turn with a task's answer. Nothing that a model wrote is evaluated.

Everything here takes time in proportion to the text, of which only the end is read.
"""

import re
from decimal import Decimal

from forgeasync.config import AnswerCheck, AnswerMatch, AnswerPart
from forgeasync.rollouts import NO_ANSWER, Score, Task

MAX_READ_CHARACTERS = 100_000
"""Only the end of a turn is searched for an answer."""

MAX_NUMBER_CHARACTERS = 100

# A minus after a digit, letter or bracket subtracts; thousands may have commas.
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)", re.ASCII)


class AnswerChecker:
    """Scores turns: 1 for the task's answer, else 0."""

    def __init__(self, section: AnswerCheck) -> None:
        self._section = section

    def score(self, task: Task, text: str) -> Score:
        """Score the model's last turn.

        Raises:
            ValueError: numbers are to be compared, and the task's answer is none.
        """
        reference = task.answer.strip()
        number = None
        if self._section.match is AnswerMatch.NUMBER:
            number = _number(reference)
            if number is None:
                raise ValueError(
                    f"task {task.task_id!r} has the answer {reference[:80]!r}, which is no number; "
                    "environment.answer.match must be 'exact'"
                )
        answer = self._answer(text[-MAX_READ_CHARACTERS:])
        if answer is None:
            return NO_ANSWER
        is_correct = answer == reference if number is None else _number(answer) == number
        return Score(float(is_correct), is_correct)

    def _answer(self, text: str) -> str | None:
        prefix = self._section.prefix
        _, found, answer = text.rpartition(prefix) if prefix else ("", "found", text)
        if not found:
            return None
        if self._section.part is AnswerPart.LAST_NUMBER:
            numbers = _NUMBER.findall(answer)
            return numbers[-1].replace(",", "") if numbers else None
        return answer.strip()


def _number(text: str) -> Decimal | None:
    """Return the value of a text that is one number and nothing else."""
    if len(text) > MAX_NUMBER_CHARACTERS or _NUMBER.fullmatch(text) is None:
        return None
    # Exact: a float would call different long numbers equal.
    return Decimal(text.replace(",", ""))
