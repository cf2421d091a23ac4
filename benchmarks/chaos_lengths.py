"""How far the lengths of a run's responses are from those of runs without faults.

A run that loses what was being sampled loses long responses first: they are in flight for longer.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST = 2.0
"""A run with faults may be so many times as far from those without as they are from each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Distances of the lengths of responses that were trained on, in tokens."""

    from_references: float
    """Mean distance of the run's from those of each run without faults."""
    between_references: float
    """Greatest distance between two runs without faults."""

    @property
    def problem(self) -> str | None:
        """Why the run's lengths are too far off; None if they are not."""
        if self.from_references <= MOST * self.between_references:
            return None
        return (
            f"the lengths of responses are {self.from_references:.2f} tokens from those of runs without "
            f"faults, which are {self.between_references:.2f} from each other; must be at most {MOST:g} "
            "times as far"
        )


def lengths_of(rollouts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the response tokens of every line of rollouts.jsonl."""
    return [line["response_tokens"] for line in rollouts]


def distance(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the 1-Wasserstein distance of two samples, in their unit.

    That is the area between their distribution functions (Vallender 1974).
    """
    values = np.sort(np.concatenate((first, second)))
    shares = [np.searchsorted(np.sort(one), values[:-1], side="right") / len(one) for one in (first, second)]
    return float(np.sum(np.abs(shares[0] - shares[1]) * np.diff(values)))


def compare(run: Sequence[int], references: Sequence[Sequence[int]]) -> Lengths | None:
    """Compare lengths with those of runs without faults; None if there are fewer than two of these."""
    if len(references) < 2:
        return None
    return Lengths(
        from_references=float(np.mean([distance(run, one) for one in references])),
        between_references=max(distance(*pair) for pair in itertools.combinations(references, 2)),
    )
