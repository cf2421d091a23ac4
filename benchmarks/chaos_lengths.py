"""Compares the response lengths of a run with those of runs without faults.

A run that loses responses in flight loses mostly long ones, which are in flight for longer. Losses before
submission are not in ``accounting/length_distance``, so lengths are also compared with runs without faults.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

MOST = 2.0
"""Factor by which the distance of a run with faults may exceed that of runs without faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLengths:
    """Response lengths of one run."""

    trained: Sequence[int]
    """Number of tokens of each trained response."""
    accounted: float
    """Mean of ``accounting/length_distance`` over steps: lengths as submitted against lengths as trained."""

    @classmethod
    def of(cls, rollouts: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> Self:
        """Return the lengths from the lines of rollouts.jsonl and metrics.jsonl."""
        key = "accounting/length_distance"
        return cls(
            trained=[line["response_tokens"] for line in rollouts],
            accounted=statistics.mean([line[key] for line in steps if key in line] or [0.0]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Distances of a run's response lengths from those of runs without faults."""

    from_references: float
    """Mean distance from the runs without faults, in tokens."""
    between_references: float
    """Largest distance between two runs without faults, in tokens."""
    accounted: float
    """Value of ``RunLengths.accounted`` of the run."""
    accounted_references: float
    """Largest ``RunLengths.accounted`` of the runs without faults."""

    @property
    def problem(self) -> str | None:
        """Reason why the run's lengths are too far off, or None."""
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
    """Compare a run with runs without faults; return None with fewer than two of these."""
    if len(references) < 2:
        return None
    pairs = itertools.combinations([one.trained for one in references], 2)
    return Lengths(
        from_references=statistics.mean(distance(run.trained, one.trained) for one in references),
        between_references=max(distance(*pair) for pair in pairs),
        accounted=run.accounted,
        accounted_references=max(one.accounted for one in references),
    )
