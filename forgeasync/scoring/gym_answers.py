"""Scores answers to reasoning-gym problems. Only for processes of verifiers.

Several of reasoning-gym's verifiers evaluate the response as Python code, and others compute the powers in
it, so they must run in ``forgeasync.scoring.worker``.
"""

import re
from contextlib import suppress
from typing import Any

from forgeasync.config import AnswerPart
from forgeasync.environments import ReasoningGymProblems
from forgeasync.rollouts import NO_ANSWER, Score
from forgeasync.scoring.verifier import GymProblem, GymVerifierChoice

SOLVED = 1.0
"""Score of a full solution by reasoning-gym's verifiers; less is partial credit."""
MAX_ABS_SCORE = 1.0

# A minus after a digit, letter or bracket subtracts.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?")


def answer_after(response: str, prefix: str) -> str | None:
    """Return the text after the last ``prefix``, stripped; None without one; with ``""``, the response."""
    _, found, answer = response.rpartition(prefix) if prefix else ("", "found", response)
    return answer.strip() if found else None


def last_number(text: str) -> str | None:
    """Return the last number in ``text``, without commas; None if there is none."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


class GymVerifier:
    """Verifier of the reasoning-gym data set that made the problem."""

    def __init__(self, choice: GymVerifierChoice) -> None:
        """Open the data set.

        Raises:
            ValueError: A field of ``data.source`` is invalid; the message names it.
        """
        self._source = choice.source
        self._is_warm = False
        self._problems = ReasoningGymProblems(
            choice.source, num_train=choice.num_train, num_held_out=choice.num_held_out, seed=choice.seed
        )

    def load(self, problem: GymProblem) -> dict[str, Any]:
        """Return reasoning-gym's own record of a problem, generated again.

        Raises:
            ValueError: ``problem`` differs from what its index generates. This prevents scoring an answer
                against another problem.
        """
        entry = self._problems.entry(problem.source_index)
        if entry["question"] != problem.prompt:
            raise ValueError(
                f"data.source.task: {self._source.task!r} generates another problem than task "
                f"{problem.task_id!r} at index {problem.source_index}"
            )
        if not self._is_warm:
            self._warm_up(entry)
        return entry

    def _warm_up(self, entry: dict[str, Any]) -> None:
        """Run the verifier on the reference, so that its late imports do not slow down the first answer."""
        self._is_warm = True
        # Some verifiers fail on an answer of None, which puzzles with many solutions have.
        with suppress(Exception):
            self._problems.score_answer(str(entry["answer"]), entry)

    def score(self, entry: dict[str, Any], response: str) -> Score:
        """Return the verifier's score, or ``NO_ANSWER`` without an answer.

        The verifier may raise any exception.
        """
        answer = answer_after(response, self._source.answer_prefix)
        if answer is not None and self._source.answer_part is AnswerPart.LAST_NUMBER:
            answer = last_number(answer)
        if answer is None:
            return NO_ANSWER
        value = self._problems.score_answer(answer, entry)
        if not abs(value) <= MAX_ABS_SCORE:
            raise ValueError(f"the verifier of {self._source.task} gave {value!r}, which is not from -1 to 1")
        return Score(value=value, is_correct=value >= SOLVED)
