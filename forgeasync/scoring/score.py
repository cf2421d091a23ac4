"""What a verifier says of one response, and how verifiers have fared."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

LARGEST = 1e30
"""Largest reward: what groups and batches make of rewards must fit into float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The reward of one step of a response, which ends before character ``end`` of its text."""

    end: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of one response, and whether the response solves its task.

    A score says for itself whether it is correct: rewards may have any scale up to ``LARGEST``. Raises
    ValueError, naming the value, where ``value`` is no such number, ``is_correct`` is no bool, or a penalty
    is negative or not finite.
    """

    value: float
    is_correct: bool
    steps: tuple[Step, ...] = ()
    """Rewards of the response's steps, ends increasing; none: the value counts for all tokens alike."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Faults besides the value, by name, such as the share of tool calls that failed: finite, at least 0.
    The filter ``resample_on_correct`` looks at their sum."""

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, Real):
            raise ValueError(f"a score must be a number, not {self.value!r}")
        if not -LARGEST <= self.value <= LARGEST:
            raise ValueError(f"a score must be finite, at most {LARGEST:g}, not {str(self.value)[:40]}")
        # Other kinds of numbers are not written to files as such.
        object.__setattr__(self, "value", float(self.value))
        if not isinstance(self.is_correct, bool):
            raise ValueError(f"is_correct of a score must be true or false, not {self.is_correct!r}")
        for name, penalty in self.penalties.items():
            is_number = isinstance(penalty, Real) and not isinstance(penalty, bool)
            if not is_number or not math.isfinite(penalty) or penalty < 0:
                raise ValueError(
                    f"penalty {name!r} of a score must be finite and at least 0, not {penalty!r}"
                )


NO_SCORE = Score(value=0.0, is_correct=False)
"""The score of a response without an answer, or whose verification was cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierCounts:
    """Answers since the scorer began that scored 0 because they could not be verified."""

    num_timeouts: int = 0
    """Cut off at ``scorer.answer_limit_s``."""
    num_crashes: int = 0
    """The process that verified them died, for instance of ``scorer.answer_memory_mib``."""
    num_errors: int = 0
    """Their verifier raised an exception, or gave no finite number from -1 to 1."""
    num_oversized: int = 0
    """Longer than any verifier is given to read."""

    def merged(self, other: "VerifierCounts") -> "VerifierCounts":
        """The later of two states of the same counts: they only rise."""
        return VerifierCounts(
            num_timeouts=max(self.num_timeouts, other.num_timeouts),
            num_crashes=max(self.num_crashes, other.num_crashes),
            num_errors=max(self.num_errors, other.num_errors),
            num_oversized=max(self.num_oversized, other.num_oversized),
        )

    def metrics(self) -> dict[str, float]:
        """Under their names in metrics.jsonl."""
        return {
            "scoring/num_timeouts": self.num_timeouts,
            "scoring/num_crashes": self.num_crashes,
            "scoring/num_errors": self.num_errors,
            "scoring/num_oversized": self.num_oversized,
        }
