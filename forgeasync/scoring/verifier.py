"""Requests to a process of verifiers, in the form that is sent. Light to import."""

from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import TypeAdapter

from forgeasync.config import ReasoningGymSource
from forgeasync.rollouts import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class MathVerifierChoice:
    """Choice of math-verify."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GymVerifierChoice:
    """Choice of the verifier of one reasoning-gym data set, with the settings that generate its problems."""

    source: ReasoningGymSource
    num_train: int
    num_held_out: int
    seed: int


VerifierChoice = GymVerifierChoice | MathVerifierChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class MathProblem:
    """Problem whose answer is compared with a reference."""

    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GymProblem:
    """Problem that is generated again from its index, and compared with the prompt of the rollout."""

    task_id: str
    source_index: int
    prompt: str


Problem = GymProblem | MathProblem


class Verifier(Protocol):
    """Scores answers inside a process of verifiers, without any limits."""

    def load(self, problem: Any) -> Any:
        """Prepare a problem, once for all its answers; raises ValueError if it is not the requested one."""
        ...

    def score(self, loaded: Any, response: str) -> Score:
        """Score one response to a loaded problem; may raise any exception."""
        ...


CHOICE_CODEC: TypeAdapter[VerifierChoice] = TypeAdapter(VerifierChoice)
PROBLEM_CODEC: TypeAdapter[Problem] = TypeAdapter(Problem)


def build_verifier(choice: VerifierChoice) -> Verifier:
    """Build the verifier of a choice; imports packages that evaluate text written by models.

    Raises:
        ValueError: A config field makes the choice impossible; the message names it.
    """
    match choice:
        case GymVerifierChoice():
            from forgeasync.scoring.gym_answers import GymVerifier

            return GymVerifier(choice)
        case MathVerifierChoice():
            from forgeasync.scoring.math_answers import MathVerifier

            return MathVerifier()
