"""Scores responses by one of our verifiers."""

import functools
from importlib import metadata

from forgeasync.config import MathReward, NamedSource, ReasoningGymReward, ReasoningGymSource, ScorerSection
from forgeasync.rollouts import Score, Task, VerifierCounts
from forgeasync.scoring.verifier import (
    GymProblem,
    GymVerifierChoice,
    MathProblem,
    MathVerifierChoice,
    Problem,
    VerifierChoice,
)
from forgeasync.scoring.verifier_pool import VerifierPool


class VerifiedScorer:
    """Verifies responses in guarded processes; see ``forgeasync.scoring.verifier_pool``. Thread-safe."""

    def __init__(self, choice: VerifierChoice, section: ScorerSection) -> None:
        """Starts nothing."""
        self._is_gym = isinstance(choice, GymVerifierChoice)
        self._pool = VerifierPool(choice, section)

    def start(self) -> str:
        """Start the processes; returns a sentence on what isolates them. Raises as ``VerifierPool.start``."""
        return self._pool.start()

    def score(self, task: Task, response: str) -> Score:
        """See ``VerifierPool.score``. What it raises is no fault of the response."""
        problem: Problem
        if self._is_gym:
            problem = GymProblem(task_id=task.task_id, source_index=task.source_index, prompt=task.prompt)
        else:
            problem = MathProblem(answer=task.answer)
        return self._pool.score(problem, response)

    @property
    def version(self) -> str:
        """Package and version of the verifier."""
        package = "reasoning-gym" if self._is_gym else "math-verify"
        return f"{package} {_version(package)}"

    @property
    def counts(self) -> VerifierCounts:
        """Responses so far that could not be verified."""
        return self._pool.counts

    def close(self) -> None:
        """Stop the processes."""
        self._pool.close()


def verifier_choice(
    reward: ReasoningGymReward | MathReward, source: NamedSource, *, seed: int
) -> VerifierChoice:
    """The verifier of a source's problems that ``build_source`` makes with the same seed, in any process."""
    if isinstance(reward, MathReward):
        return MathVerifierChoice()
    assert isinstance(source.source, ReasoningGymSource), "checked before a run starts"
    return GymVerifierChoice(
        source=source.source, num_train=source.num_train, num_held_out=source.num_held_out, seed=seed
    )


@functools.cache
def _version(package: str) -> str:
    # Looked up in the file system, which for every response would cost more than verifying it.
    return metadata.version(package)
