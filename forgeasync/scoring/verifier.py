"""The requests to a process of verifiers, in the form that is sent to it; light to import."""

from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import TypeAdapter

from forgeasync.config import ReasoningGymSource
from forgeasync.rollouts import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class MathVerifierChoice:
    """math-verify."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GymVerifierChoice:
    """The verifier of one reasoning-gym data set; the fields are what generates its problems again."""

    source: ReasoningGymSource
    num_train: int
    num_held_out: int
    seed: int


VerifierChoice = GymVerifierChoice | MathVerifierChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class MathProblem:
    """A problem whose answer is compared with a reference."""

    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GymProblem:
    """A problem that is generated again from its index, and compared with the prompt that was sampled for."""

    task_id: str
    source_index: int
    prompt: str


Problem = GymProblem | MathProblem


class Verifier(Protocol):
    """Judges answers inside a process of verifiers, without any limits."""

    def load(self, problem: Any) -> Any:
        """Prepare a problem, once for its answers. Raises ValueError where it is not the one asked for."""
        ...

    def score(self, loaded: Any, response: str) -> Score:
        """Judge one response to a problem that was loaded; may raise anything."""
        ...


CHOICE_CODEC: TypeAdapter[VerifierChoice] = TypeAdapter(VerifierChoice)
PROBLEM_CODEC: TypeAdapter[Problem] = TypeAdapter(Problem)


def build_verifier(choice: VerifierChoice) -> Verifier:
    """The verifier of a choice; imports what it needs, which evaluates what models write.

    Raises ValueError naming the config field that makes it impossible.
    """
    match choice:
        case GymVerifierChoice():
            from forgeasync.scoring.gym_answers import GymVerifier

            return GymVerifier(choice)
        case MathVerifierChoice():
            from forgeasync.scoring.math_answers import MathVerifier

            return MathVerifier()
