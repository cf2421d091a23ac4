"""Scores answers to reasoning-gym problems. For the processes of verifiers only.

Several of reasoning-gym's verifiers evaluate what the model wrote as Python code, and others take the powers
that it asks for: they belong into ``forgeasync.scoring.worker``.
"""

import re
from contextlib import suppress
from typing import Any

from forgeasync.config import AnswerPart
from forgeasync.environments import ReasoningGymProblems
from forgeasync.rollouts import NO_ANSWER, Score
from forgeasync.scoring.verifier import GymProblem, GymVerifierChoice

SOLVED = 1.0
"""The score that reasoning-gym's verifiers give a full solution; less is partial credit."""
MAX_ABS_SCORE = 1.0

# A minus after a digit, letter or bracket subtracts.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?")


def answer_after(response: str, prefix: str) -> str | None:
    """Return the text after the last ``prefix``, stripped; None without one; with ``""``, the response."""
    _, found, answer = response.rpartition(prefix) if prefix else ("", "found", response)
    return answer.strip() if found else None


def last_number(text: str) -> str | None:
    """The last number in ``text``, without commas; None if there is none."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


class GymVerifier:
    """Scores with the verifier of the reasoning-gym data set that made the problem."""

    def __init__(self, choice: GymVerifierChoice) -> None:
        """Raises ValueError naming the field of ``data.source`` that is impossible."""
        self._source = choice.source
        self._is_warm = False
        self._problems = ReasoningGymProblems(
            choice.source, num_train=choice.num_train, num_held_out=choice.num_held_out, seed=choice.seed
        )

    def load(self, problem: GymProblem) -> dict[str, Any]:
        """reasoning-gym's own record of a problem, generated again.

        Raises ValueError if ``problem`` is not what its index generates, so that no answer is ever judged
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
        """Import what the verifier imports late, so that no answer pays for it, with the reference itself."""
        self._is_warm = True
        # Some verifiers fail on an answer of None, which puzzles with many solutions have.
        with suppress(Exception):
            self._problems.score_answer(str(entry["answer"]), entry)

    def score(self, entry: dict[str, Any], response: str) -> Score:
        """The verifier's score; ``NO_ANSWER`` without an answer. Raises what the verifier raises."""
        answer = answer_after(response, self._source.answer_prefix)
        if answer is not None and self._source.answer_part is AnswerPart.LAST_NUMBER:
            answer = last_number(answer)
        if answer is None:
            return NO_ANSWER
        value = self._problems.score_answer(answer, entry)
        if not abs(value) <= MAX_ABS_SCORE:
            raise ValueError(f"the verifier of {self._source.task} gave {value!r}, which is not from -1 to 1")
        return Score(value=value, is_correct=value >= SOLVED)
