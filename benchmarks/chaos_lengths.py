"""How far the lengths of a run's responses are from what they would be without faults.

A run that loses what was being sampled loses long responses first: they are in flight for longer. What is
lost before it was submitted is not in ``accounting/length_distance``, so lengths are also compared with those
of runs without faults.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

MOST = 2.0
"""A run with faults may be so many times as far off as runs without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLengths:
    """Lengths of responses of one run."""

    trained: Sequence[int]
    """Tokens of every response that was trained on."""
    accounted: float
    """Mean over its steps of ``accounting/length_distance``: lengths as submitted against as trained."""

    @classmethod
    def of(cls, rollouts: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> Self:
        """Read them from the lines of rollouts.jsonl and metrics.jsonl."""
        key = "accounting/length_distance"
        return cls(
            trained=[line["response_tokens"] for line in rollouts],
            accounted=statistics.mean([line[key] for line in steps if key in line] or [0.0]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A run's lengths beside those of runs without faults."""

    from_references: float
    """Mean distance from those of each run without faults, in tokens."""
    between_references: float
    """Greatest distance between two runs without faults, in tokens."""
    accounted: float
    """``RunLengths.accounted`` of the run."""
    accounted_references: float
    """The greatest of the runs without faults."""

    @property
    def problem(self) -> str | None:
        """Why the run's lengths are too far off; None if they are not."""
        for what, found, undisturbed in (
            ("from those of runs without faults (tokens)", self.from_references, self.between_references),
            ("as trained from those submitted", self.accounted, self.accounted_references),
        ):
            if found > MOST * undisturbed:
                return (
                    f"the distance of lengths {what} is {found:.3g}, and without faults {undisturbed:.3g}; "
                    f"must be at most {MOST:g} times as far"
                )
        return None


def distance(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the 1-Wasserstein distance of two samples, in their unit.

    That is the area between their distribution functions (Vallender 1974).
    """
    values = np.sort(np.concatenate((first, second)))
    shares = [np.searchsorted(np.sort(one), values[:-1], side="right") / len(one) for one in (first, second)]
    return float(np.sum(np.abs(shares[0] - shares[1]) * np.diff(values)))


def compare(run: RunLengths, references: Sequence[RunLengths]) -> Lengths | None:
    """Compare a run with those without faults; None if there are fewer than two of these."""
    if len(references) < 2:
        return None
    pairs = itertools.combinations([one.trained for one in references], 2)
    return Lengths(
        from_references=statistics.mean(distance(run.trained, one.trained) for one in references),
        between_references=max(distance(*pair) for pair in pairs),
        accounted=run.accounted,
        accounted_references=max(one.accounted for one in references),
    )
