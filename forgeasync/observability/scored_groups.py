"""What the scores of a step say: parts, groups without contrast, lengths of right and wrong answers."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from forgeasync.scoring.score import Score


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

    def add(self, scores: Sequence[Score], lengths: Sequence[int]) -> None:
        """One group: a score and a number of tokens for each of its responses."""
        self._num_groups += 1
        self._num_all_correct += all(score.is_correct for score in scores)
        self._num_all_wrong += not any(score.is_correct for score in scores)
        for score, length in zip(scores, lengths, strict=True):
            self._values.append(score.value)
            self._num_without_answer += not score.has_answer
            (self._lengths_of_correct if score.is_correct else self._lengths_of_wrong).append(length)

    def metrics(self) -> dict[str, float]:
        """Under their names in metrics.jsonl; what nothing was counted for is left out."""
        metrics: dict[str, float] = {}
        if self._values:
            metrics["reward/scored_mean"] = sum(self._values) / len(self._values)
            metrics["group/all_correct_share"] = self._num_all_correct / self._num_groups
            metrics["group/all_wrong_share"] = self._num_all_wrong / self._num_groups
            metrics["response/no_answer_share"] = self._num_without_answer / len(self._values)
        for name, lengths in (("correct", self._lengths_of_correct), ("wrong", self._lengths_of_wrong)):
            if lengths:
                metrics[f"response/length_mean_{name}"] = sum(lengths) / len(lengths)
        return metrics
