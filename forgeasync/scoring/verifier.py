"""The choice of a verifier, in the form that is sent to its process. Light to import."""

from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import TypeAdapter

from forgeasync.config import ReasoningGymSource
from forgeasync.rollouts import Score, Task


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


class Verifier(Protocol):
    """Scores answers inside a process of verifiers, without any limits."""

    def load(self, task: Task) -> Any:
        """Prepare a task, once for all its answers; raises ValueError if it differs here."""
        ...

    def score(self, loaded: Any, response: str) -> Score:
        """Score one response to a loaded task; may raise any exception."""
        ...


CHOICE_CODEC: TypeAdapter[VerifierChoice] = TypeAdapter(VerifierChoice)


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
