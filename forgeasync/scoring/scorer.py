"""From a response to its reward, by the verifier that belongs to the problem's source."""

import logging
import re
from typing import TYPE_CHECKING, Protocol

from forgeasync.config.schema import AnswerPart, DataSection, HuggingFaceSource, ReasoningGymSource
from forgeasync.data.task import Task
from forgeasync.scoring.math import math_reward

if TYPE_CHECKING:
    from forgeasync.data.reasoning_gym_source import ReasoningGymProblems

logger = logging.getLogger(__name__)


# A minus after a digit, letter or bracket subtracts.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?")


class Scorer(Protocol):
    """Judges responses."""

    def score(self, task: Task, response: str) -> float:
        """The reward of ``response``; 1.0 is a full solution."""
        ...


def answer_after(response: str, prefix: str) -> str | None:
    """What follows the last ``prefix`` in ``response``, stripped; None without one; all of it for ``""``."""
    _, found, answer = response.rpartition(prefix) if prefix else ("", "found", response)
    return answer.strip() if found else None


def last_number(text: str) -> str | None:
    """The last number in ``text``, without commas; None if there is none."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


class ReasoningGymScorer:
    """Scores with the verifier of the reasoning-gym data set that made the problem."""

    def __init__(self, problems: "ReasoningGymProblems") -> None:
        self._problems = problems
        self._num_errors = 0

    @property
    def num_errors(self) -> int:
        """Responses that made the verifier raise (and so scored 0.0)."""
        return self._num_errors

    def score(self, task: Task, response: str) -> float:
        """The verifier's score; 0.0 for a response without an answer.

        Raises ValueError if ``task`` is not what its index generates, so that no answer is ever judged
        against another problem.
        """
        source = self._problems.source
        answer = answer_after(response, source.answer_prefix)
        if answer is not None and source.answer_part is AnswerPart.LAST_NUMBER:
            answer = last_number(answer)
        if answer is None:
            return 0.0
        entry = self._problems.entry(task.source_index)
        if entry["question"] != task.prompt:
            raise ValueError(
                f"data.source.task: {source.task!r} generates another problem than task "
                f"{task.task_id!r} at index {task.source_index}"
            )
        try:
            return self._problems.score_answer(answer, entry)
        except Exception:  # any type: 100 verifiers read untrusted text, each fails in its own way
            self._num_errors += 1
            logger.warning(
                "the verifier of %s raised on an answer to %s (%d so far); it scores 0",
                self._problems.source.task,
                task.task_id,
                self._num_errors,
                exc_info=True,
            )
            return 0.0


class MathScorer:
    """Scores the final answer against the task's reference with math-verify."""

    def score(self, task: Task, response: str) -> float:
        """1.0 or 0.0; see ``math_reward``."""
        return math_reward(response, task.answer)


def build_scorer(data: DataSection, *, seed: int) -> Scorer:
    """The scorer for the problems that ``build_source`` makes of the same arguments, in any process.

    Generates no problem. Raises ValueError naming the config field as ``build_source`` does.
    """
    match data.source:
        case ReasoningGymSource():
            # Takes seconds to import, and math problems never need it.
            from forgeasync.data.reasoning_gym_source import ReasoningGymProblems

            return ReasoningGymScorer(
                ReasoningGymProblems(
                    data.source, num_train=data.num_train, num_held_out=data.num_held_out, seed=seed
                )
            )
        case HuggingFaceSource():
            return MathScorer()
