"""Scores answers to reasoning-gym problems. Only for processes of verifiers.

Several of reasoning-gym's verifiers evaluate the response as Python code, and others compute the powers in
it, so they must run in ``forgeasync.scoring.worker``.
"""

from contextlib import suppress
from typing import Any

from forgeasync.environments import ReasoningGymProblems, final_answer
from forgeasync.rollouts import NO_ANSWER, Score, Task
from forgeasync.scoring.verifier import GymVerifierChoice

SOLVED = 1.0
"""Score of a full solution by reasoning-gym's verifiers; less is partial credit."""
MAX_ABS_SCORE = 1.0


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

    def load(self, task: Task) -> dict[str, Any]:
        """Return reasoning-gym's own record of a task, generated again.

        Raises:
            ValueError: The task differs from what its index generates. This prevents scoring an answer
                against another problem.
        """
        entry = self._problems.entry(task.source_index)
        if entry["question"] != task.prompt:
            raise ValueError(
                f"data.source.task: {self._source.task!r} generates another problem than task "
                f"{task.task_id!r} at index {task.source_index}"
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
        answer = final_answer(response, prefix=self._source.answer_prefix, part=self._source.answer_part)
        if answer is None:
            return NO_ANSWER
        value = self._problems.score_answer(answer, entry)
        if not abs(value) <= MAX_ABS_SCORE:
            raise ValueError(f"the verifier of {self._source.task} gave {value!r}, which is not from -1 to 1")
        return Score(value=value, is_correct=value >= SOLVED)
