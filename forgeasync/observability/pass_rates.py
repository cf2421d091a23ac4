"""How well problems are solved with several samples each: averages and pass@k, with confidence intervals.

An interval says how far the figure could lie from that of all problems of the kind: problems are drawn from
there, and samples of one problem resemble each other. So problems are what is counted, not responses
(E. Miller, "Adding Error Bars to Evals", 2024, arXiv:2411.00640, section 2.2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95

Z = 1.959963984540054
"""Quantile of the normal distribution for two-sided intervals of 95 percent."""

NUM_RESAMPLES = 10_000
"""Resamples of a bootstrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure with its interval; None where too few problems say anything of it."""

    value: float
    low: float | None
    high: float | None
    num_problems: int
    """Problems that it is the mean over."""

    @property
    def record(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "num_problems": self.num_problems,
        }

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemScores:
    """The scored responses to one problem."""

    num_correct: int
    values: tuple[float, ...]
    """Scores of all of them."""

    @property
    def num_scored(self) -> int:
        """Number of responses that were scored."""
        return len(self.values)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate, without bias, the chance that at least one of k responses is correct.

    1 - C(n - c, k) / C(n, k) for c correct ones among n >= k responses, computed as a product (M. Chen et
    al., "Evaluating Large Language Models Trained on Code", 2021, arXiv:2107.03374, section 2.1).
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples
    if num_samples - num_correct < k:
        return 1.0
    places = range(num_samples - num_correct + 1, num_samples + 1)
    return 1.0 - math.prod(1.0 - k / place for place in places)


def powers_of_two(num_samples: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``num_samples``."""
    return [2**power for power in range(num_samples.bit_length())]


def proportion(shares: Sequence[float], *, num_responses: int) -> Estimate:
    """Return the mean of shares in [0, 1], one for each problem, with a Wilson interval.

    The interval (E. B. Wilson, 1927) is that of an effective number of independent problems,
    p (1 - p) / (s^2 / n) with the shares' mean p and variance s^2 (E. L. Korn and B. I. Graubard, 1998,
    Survey Methodology 24). With one sample each it is n, and the interval Wilson's own; where problems have
    shares between 0 and 1 it is more, at most the ``num_responses`` of all problems. Unlike a bootstrap it
    has a width where all problems are solved, or none.
    """
    n = len(shares)
    p = math.fsum(shares) / n
    variance = math.fsum((share - p) ** 2 for share in shares) / n
    num_effective = float(n)
    if 0.0 < p < 1.0:
        most = float(max(n, num_responses))
        num_effective = most if variance == 0.0 else min(most, n * p * (1.0 - p) / variance)
    denominator = 1.0 + Z**2 / num_effective
    center = (p + Z**2 / (2.0 * num_effective)) / denominator
    half = Z * math.sqrt(p * (1.0 - p) / num_effective + Z**2 / (4.0 * num_effective**2)) / denominator
    return Estimate(value=p, low=max(0.0, center - half), high=min(1.0, center + half), num_problems=n)


def mean_score(means: Sequence[float]) -> Estimate:
    """Return the mean of problems' mean scores, of any scale, with a percentile bootstrap over problems.

    B. Efron, "Bootstrap methods: another look at the jackknife", 1979. The resamples are the same in every
    process. One problem has no interval.
    """
    values_N = np.asarray(means, np.float64)
    n = len(values_N)
    mean = float(values_N.mean())
    if n < 2:
        return Estimate(value=mean, low=None, high=None, num_problems=n)
    rng = np.random.default_rng(0)
    # In parts: with thousands of problems all resamples at once would take gigabytes.
    resampled = [float(values_N[rng.integers(0, n, n)].mean()) for _ in range(NUM_RESAMPLES)]
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return Estimate(value=mean, low=float(low), high=float(high), num_problems=n)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSummary:
    """What the responses to a set of problems say."""

    num_problems: int
    num_samples: int
    """Responses that were asked for, to each problem."""
    num_unscored: int
    """Responses without a score. They count for nothing."""
    accuracy: Estimate | None
    """Mean over problems of the share of scored responses that are correct; None: nothing was scored."""
    score: Estimate | None
    """Mean over problems of the mean score."""
    pass_at: dict[int, Estimate]
    """By k. Problems with fewer than k scored responses are left out; see ``Estimate.num_problems``."""

    @property
    def record(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "num_problems": self.num_problems,
            "num_samples": self.num_samples,
            "num_responses": self.num_problems * self.num_samples,
            "num_unscored": self.num_unscored,
            "accuracy": None if self.accuracy is None else self.accuracy.record,
            "score": None if self.score is None else self.score.record,
            "pass_at": {str(k): estimate.record for k, estimate in self.pass_at.items()},
        }


def summarize(problems: Sequence[ProblemScores], *, num_samples: int) -> SetSummary:
    """Sum up the scored responses to all problems of a set, of ``num_samples`` that each was to have."""
    scored = [one for one in problems if one.num_scored]
    num_responses = sum(one.num_scored for one in scored)
    pass_at = {}
    for k in powers_of_two(num_samples):
        if enough := [one for one in scored if one.num_scored >= k]:
            pass_at[k] = proportion(
                [pass_at_k(one.num_scored, one.num_correct, k) for one in enough],
                num_responses=sum(one.num_scored for one in enough),
            )
    accuracy = score = None
    if scored:
        shares = [one.num_correct / one.num_scored for one in scored]
        accuracy = proportion(shares, num_responses=num_responses)
        score = mean_score([math.fsum(one.values) / one.num_scored for one in scored])
    return SetSummary(
        num_problems=len(problems),
        num_samples=num_samples,
        num_unscored=len(problems) * num_samples - num_responses,
        accuracy=accuracy,
        score=score,
        pass_at=pass_at,
    )
