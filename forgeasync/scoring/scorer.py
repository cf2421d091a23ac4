"""From a response to its score, by the verifier that belongs to the problem's source."""

from typing import Protocol

from forgeasync.config.data_schema import HuggingFaceSource, ReasoningGymSource
from forgeasync.config.schema import DataSection
from forgeasync.config.scorer_schema import ScorerSection
from forgeasync.data.task import Task
from forgeasync.scoring.score import Score, VerifierCounts
from forgeasync.scoring.verifier import (
    GymProblem,
    GymVerifierChoice,
    MathProblem,
    MathVerifierChoice,
    Problem,
    VerifierChoice,
)
from forgeasync.scoring.verifier_pool import VerifierPool


class Scorer(Protocol):
    """Judges responses. Thread-safe."""

    def score(self, task: Task, response: str) -> Score:
        """The score of ``response``. What it raises is no fault of the response."""
        ...

    @property
    def counts(self) -> VerifierCounts:
        """Responses so far that could not be verified."""
        ...


class VerifiedScorer:
    """Has guarded processes verify responses; see ``forgeasync.scoring.verifier_pool``."""

    def __init__(self, choice: VerifierChoice, section: ScorerSection) -> None:
        """Starts nothing."""
        self._is_gym = isinstance(choice, GymVerifierChoice)
        self._pool = VerifierPool(choice, section)

    def start(self) -> str:
        """Start the processes; returns a sentence on what isolates them. Raises as ``VerifierPool.start``."""
        return self._pool.start()

    def score(self, task: Task, response: str) -> Score:
        """See ``VerifierPool.score``."""
        problem: Problem
        if self._is_gym:
            problem = GymProblem(task_id=task.task_id, source_index=task.source_index, prompt=task.prompt)
        else:
            problem = MathProblem(answer=task.answer)
        return self._pool.score(problem, response)

    @property
    def counts(self) -> VerifierCounts:
        return self._pool.counts

    def close(self) -> None:
        """Stop the processes."""
        self._pool.close()


def build_scorer(data: DataSection, section: ScorerSection, *, seed: int) -> VerifiedScorer:
    """The scorer for the problems that ``build_source`` makes of the same arguments, in any process.

    Generates no problem, imports no verifier and starts no process: ``start`` does, and raises ValueError
    naming the config field as ``build_source`` does.
    """
    match data.source:
        case ReasoningGymSource():
            choice = GymVerifierChoice(
                source=data.source, num_train=data.num_train, num_held_out=data.num_held_out, seed=seed
            )
            return VerifiedScorer(choice, section)
        case HuggingFaceSource():
            return VerifiedScorer(MathVerifierChoice(), section)
