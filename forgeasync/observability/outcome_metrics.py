"""Metrics of outcomes: scored groups and ended episodes of a step, and evaluations.

Confidence intervals are for the mean over all problems of a kind, from which the evaluated problems are
drawn. The sampling unit is the problem and not the response, because responses to one problem are correlated
(E. Miller, "Adding Error Bars to Evals", 2024, arXiv:2411.00640, section 2.2).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from forgeasync.config import Ending
from forgeasync.rollouts import EpisodeOutcome, Score, ToolStatus, VersionRange

CONFIDENCE = 0.95

Z = 1.959963984540054
"""Quantile of the normal distribution for two-sided intervals of 95 percent."""

NUM_RESAMPLES = 10_000
"""Number of resamples of a bootstrap."""

SESSION_COUNTS = (
    "num_requests",
    "num_turns",
    "num_refused",
    "num_failed",
    "num_retries_joined",
    "num_not_honoured",
    "num_with_unknown_fields",
    "num_abandoned",
)
"""Counts of a session that become metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScores:
    """Scores of the responses to held-out problems. Responses without a score are counted separately."""

    num_correct: int
    score_sum: float
    """Sum of all scores, including partial credit."""
    num_scored: int
    num_unscored: int
    parts: Mapping[str, float] = field(default_factory=dict)
    """Mean of each part of the scores, by name."""
    sets: Mapping[str, "HeldOutScores"] = field(default_factory=dict)
    """Scores of each set of ``evaluation.sets``, by name."""
    versions: VersionRange | None = None
    """Policy versions that sampled the responses; None if there are none, or if they are unknown."""
    wall_s: float | None = None
    """Duration of the evaluation in seconds, including sets; None for a part of an evaluation."""

    @property
    def accuracy(self) -> float | None:
        """Share of the scored responses that are correct; None if none was scored."""
        return self.num_correct / self.num_scored if self.num_scored else None

    @property
    def score_mean(self) -> float | None:
        """Mean score of the scored responses; None if none was scored."""
        return self.score_sum / self.num_scored if self.num_scored else None

    @property
    def num_unscored_in_all(self) -> int:
        """Number of responses without a score, including those of the sets."""
        return self.num_unscored + sum(one.num_unscored_in_all for one in self.sets.values())

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl. Without scores, accuracy and mean are left out."""
        metrics: dict[str, float] = {f"{prefix}/num_unscored": self.num_unscored}
        if self.accuracy is not None and self.score_mean is not None:
            metrics |= {f"{prefix}/accuracy": self.accuracy, f"{prefix}/score_mean": self.score_mean}
        if self.versions is not None:
            metrics |= {
                f"{prefix}/version_min": self.versions.first,
                f"{prefix}/version_max": self.versions.last,
            }
        if self.wall_s is not None:
            metrics[f"{prefix}/wall_s"] = self.wall_s
        metrics |= {f"{prefix}/reward/{name}": mean for name, mean in self.parts.items()}
        for name, scores in self.sets.items():
            metrics |= scores.metrics(f"{prefix}/{name}")
        return metrics

    def __str__(self) -> str:
        if not self.num_scored + self.num_unscored:
            text = "there are no held-out problems"
        elif self.accuracy is None:
            text = f"held-out accuracy unknown: none of {self.num_unscored} responses was scored"
        else:
            text = f"held-out accuracy {self.accuracy:.3f}, mean score {self.score_mean:.3f}"
        if self.versions is not None and self.versions.first < self.versions.last:
            text += f", sampled under versions {self.versions.first} to {self.versions.last}"
        for name, scores in self.sets.items():
            text += f"; {name} " + ("unknown" if scores.accuracy is None else f"{scores.accuracy:.3f}")
        return text


def part_means(scores: Iterable[Score]) -> dict[str, float]:
    """Return the mean of each part over the scores that have it, sorted by name."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.parts.items():
            values[name].append(value)
    return {name: math.fsum(values[name]) / len(values[name]) for name in sorted(values)}


class ScoredGroups:
    """Statistics of the groups that were scored during a step, before filters."""

    def __init__(self) -> None:
        self._scores: list[Score] = []
        self._lengths: dict[bool, list[int]] = {True: [], False: []}
        """Lengths of correct (True) and wrong (False) responses, in tokens."""
        self._num_groups = 0
        self._num_all_correct = 0
        self._num_all_wrong = 0

    def add(self, scores: Sequence[Score], lengths: Sequence[int]) -> None:
        """Add one group, with the score and the number of tokens of each of its responses."""
        self._num_groups += 1
        self._num_all_correct += all(score.is_correct for score in scores)
        self._num_all_wrong += not any(score.is_correct for score in scores)
        self._scores += scores
        for score, length in zip(scores, lengths, strict=True):
            self._lengths[bool(score.is_correct)].append(length)

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl. Metrics without data are left out."""
        metrics: dict[str, float] = {}
        if num := len(self._scores):
            metrics["reward/scored_mean"] = sum(score.value for score in self._scores) / num
            metrics["group/all_correct_share"] = self._num_all_correct / self._num_groups
            metrics["group/all_wrong_share"] = self._num_all_wrong / self._num_groups
            metrics["response/no_answer_share"] = sum(not one.has_answer for one in self._scores) / num
        metrics |= {f"score/{part}": mean for part, mean in part_means(self._scores).items()}
        for name, lengths in (("correct", self._lengths[True]), ("wrong", self._lengths[False])):
            if lengths:
                metrics[f"response/length_mean_{name}"] = sum(lengths) / len(lengths)
        return metrics


class EndedEpisodes:
    """Statistics of ended training episodes: counts since the command started, means over the last step."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {
            **{f"episode/ended_{ending}": 0 for ending in Ending},
            **{f"episode/num_tool_calls_{status}": 0 for status in ToolStatus},
            **{f"session/{name}": 0 for name in SESSION_COUNTS},
            "episode/num_artifacts": 0,
            "episode/num_refused_artifacts": 0,
            "episode/num_cut_record_bytes": 0,
            "episode/num_rewritten_histories": 0,
            "episode/num_faulty_tool_calls": 0,
            "episode/num_turns_from_text": 0,
            "episode/num_reserved_texts": 0,
        }
        self._outcomes: list[EpisodeOutcome] = []

    def add(self, outcomes: Sequence[EpisodeOutcome]) -> None:
        """Add attempts at episodes that have ended."""
        self._outcomes += outcomes
        for outcome in outcomes:
            self._counts[f"episode/ended_{outcome.ending}"] += 1
            for name in self._counts:
                self._counts[name] += outcome.counts[name]

    def metrics(self) -> dict[str, float]:
        """Return metrics by their names in metrics.jsonl. Means are over the last step's episodes."""
        metrics = dict(self._counts)
        whole = [one for one in self._outcomes if one.ending is not Ending.INFRASTRUCTURE]
        if whole:
            summed_s = sum(one.episode_s for one in whole)
            metrics["episode/turns_mean"] = sum(one.num_turns for one in whole) / len(whole)
            metrics["episode/turns_max"] = max(one.num_turns for one in whole)
            metrics["episode/mean_s"] = summed_s / len(whole)
            metrics["episode/max_s"] = max(one.episode_s for one in whole)
            metrics["episode/sampling_share"] = sum(one.sampling_s for one in whole) / summed_s
        if calls_s := [call_s for one in whole for call_s in one.tool_calls_s]:
            metrics["episode/tool_call_p50_s"] = float(np.percentile(calls_s, 50))
            metrics["episode/tool_call_p95_s"] = float(np.percentile(calls_s, 95))
            metrics["episode/tool_call_max_s"] = max(calls_s)
        return metrics

    def end_step(self) -> None:
        """Clear the outcomes over which means are computed, because another step begins."""
        self._outcomes.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimate with its confidence interval, which is None if there are too few problems."""

    value: float
    low: float | None
    high: float | None
    num_problems: int
    """Number of problems over which ``value`` is the mean."""

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemScores:
    """Scores of the scored responses to one problem."""

    num_correct: int
    values: tuple[float, ...]
    """Scores of all scored responses."""

    @property
    def num_scored(self) -> int:
        """Number of scored responses."""
        return len(self.values)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k responses is correct.

    It is 1 - C(n - c, k) / C(n, k) for c correct responses among n >= k, computed as a product (M. Chen et
    al., "Evaluating Large Language Models Trained on Code", 2021, arXiv:2107.03374, section 2.1).
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples
    if num_samples - num_correct < k:
        return 1.0
    places = range(num_samples - num_correct + 1, num_samples + 1)
    return 1.0 - math.prod(1.0 - k / place for place in places)


def proportion(shares: Sequence[float], *, num_responses: int) -> Estimate:
    """Return the mean of shares in [0, 1], one for each problem, with a Wilson interval.

    The interval (E. B. Wilson, 1927) uses an effective number of independent trials, p (1 - p) / (s^2 / n)
    with the shares' mean p and variance s^2 (E. L. Korn and B. I. Graubard, 1998, Survey Methodology 24).
    With one sample per problem, this number is n, and the interval is Wilson's own. If problems have shares
    between 0 and 1, it is larger, up to ``num_responses``, the number of responses to all problems. Unlike a
    bootstrap, the interval has a width even if all or no problems are solved.
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
    """Return the mean of problems' mean scores, of any scale, with a percentile bootstrap interval.

    The bootstrap resamples problems, with a fixed seed. A single problem has no interval. Source: B. Efron,
    "Bootstrap methods: another look at the jackknife", 1979.
    """
    values_N = np.asarray(means, np.float64)
    n = len(values_N)
    mean = float(values_N.mean())
    if n < 2:
        return Estimate(value=mean, low=None, high=None, num_problems=n)
    rng = np.random.default_rng(0)
    # One resample at a time, because all of them would take gigabytes with thousands of problems.
    resampled = [float(values_N[rng.integers(0, n, n)].mean()) for _ in range(NUM_RESAMPLES)]
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return Estimate(value=mean, low=float(low), high=float(high), num_problems=n)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSummary:
    """Summary of the responses to a set of problems."""

    num_problems: int
    num_samples: int
    """Number of responses requested for each problem."""
    num_unscored: int
    """Number of responses without a score, which are ignored."""
    accuracy: Estimate | None
    """Mean over problems of the share of scored responses that are correct; None if none was scored."""
    score: Estimate | None
    """Mean over problems of the mean score; None if no response was scored."""
    pass_at: dict[int, Estimate]
    """pass@k by k, without problems that have fewer than k scored responses (``Estimate.num_problems``)."""

    @property
    def record(self) -> dict[str, Any]:
        """Summary as JSON values."""
        return asdict(self) | {
            "num_responses": self.num_problems * self.num_samples,
            "pass_at": {str(k): asdict(estimate) for k, estimate in self.pass_at.items()},
        }


def summarize(problems: Sequence[ProblemScores], *, num_samples: int) -> SetSummary:
    """Summarize the responses to all problems of a set. ``num_samples`` were requested for each problem.

    Computes pass@k for all powers of two k up to ``num_samples``.
    """
    scored = [one for one in problems if one.num_scored]
    num_responses = sum(one.num_scored for one in scored)
    pass_at = {}
    for k in (2**power for power in range(num_samples.bit_length())):
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
