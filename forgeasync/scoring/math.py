"""Rewards for mathematical answers where no run is: one call, verified as in a run."""

from forgeasync.config.scorer_schema import ScorerSection
from forgeasync.scoring.verifier import MathProblem, MathVerifierChoice
from forgeasync.scoring.verifier_pool import VerifierPool

DEFAULT_VERIFIERS = VerifierPool(MathVerifierChoice(), ScorerSection(num_workers=1))
"""What is behind ``math_reward``; it holds no process until its first call."""


def math_reward(response: str, answer: str) -> float:
    r"""1.0 if the final answer of ``response`` (its last ``\boxed``, if any) equals ``answer``, else 0.0.

    Works from any thread. Raises VerifierFailure if no process can be started.
    """
    return DEFAULT_VERIFIERS.score(MathProblem(answer=answer), response).value
