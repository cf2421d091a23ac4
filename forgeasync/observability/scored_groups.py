"""What the scores of a step and of an evaluation say."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from forgeasync.rollouts import Score, VersionRange


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScores:
    """Counts over the responses to held-out problems; those that could not be scored are counted apart."""

    num_correct: int
    score_sum: float
    """Partial credit included."""
    num_scored: int
    num_unscored: int
    parts: Mapping[str, float] = field(default_factory=dict)
    """Means of the scores' parts, by name."""
    sets: Mapping[str, "HeldOutScores"] = field(default_factory=dict)
    """The same for every set of ``evaluation.sets``, by name."""
    versions: VersionRange | None = None
    """The policy versions that sampled the responses; None where there is none, or nobody knows."""
    wall_s: float | None = None
    """Seconds from beginning to end, sets included; None for a part of an evaluation."""

    @property
    def accuracy(self) -> float | None:
        """Share of the scored responses that are correct; None where none was scored."""
        return self.num_correct / self.num_scored if self.num_scored else None

    @property
    def score_mean(self) -> float | None:
        """None where none was scored."""
        return self.score_sum / self.num_scored if self.num_scored else None

    @property
    def num_unscored_in_all(self) -> int:
        """The sets' included."""
        return self.num_unscored + sum(one.num_unscored_in_all for one in self.sets.values())

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """Under their names in metrics.jsonl; without scores, only the count of what was not scored."""
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
    """The mean of every part by its name, over the scores that have it; sorted by name."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.parts.items():
            values[name].append(value)
    return {name: math.fsum(values[name]) / len(values[name]) for name in sorted(values)}


class ScoredGroups:
    """Counts of the groups that were scored, before any filter."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._lengths_of_correct: list[int] = []
        self._lengths_of_wrong: list[int] = []
        self._num_groups = 0
        self._num_all_correct = 0
        self._num_all_wrong = 0
        self._num_without_answer = 0
        self._parts: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, scores: Sequence[Score], lengths: Sequence[int]) -> None:
        """One group: a score and a number of tokens for each of its responses."""
        self._num_groups += 1
        self._num_all_correct += all(score.is_correct for score in scores)
        self._num_all_wrong += not any(score.is_correct for score in scores)
        for score, length in zip(scores, lengths, strict=True):
            self._values.append(score.value)
            self._num_without_answer += not score.has_answer
            for part, value in score.parts.items():
                self._parts[part].append(value)
            (self._lengths_of_correct if score.is_correct else self._lengths_of_wrong).append(length)

    def metrics(self) -> dict[str, float]:
        """Under their names in metrics.jsonl; what nothing was counted for is left out."""
        metrics: dict[str, float] = {}
        if self._values:
            metrics["reward/scored_mean"] = sum(self._values) / len(self._values)
            metrics["group/all_correct_share"] = self._num_all_correct / self._num_groups
            metrics["group/all_wrong_share"] = self._num_all_wrong / self._num_groups
            metrics["response/no_answer_share"] = self._num_without_answer / len(self._values)
        for part in sorted(self._parts):
            metrics[f"score/{part}"] = math.fsum(self._parts[part]) / len(self._parts[part])
        for name, lengths in (("correct", self._lengths_of_correct), ("wrong", self._lengths_of_wrong)):
            if lengths:
                metrics[f"response/length_mean_{name}"] = sum(lengths) / len(lengths)
        return metrics
