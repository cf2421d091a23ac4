"""What an evaluation on held-out problems found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScores:
    """Counts over one response to each held-out problem; those that could not be scored are counted apart."""

    num_correct: int
    score_sum: float
    """Partial credit included."""
    num_scored: int
    num_unscored: int

    @property
    def accuracy(self) -> float | None:
        """Share of the scored responses that are correct; None where none was scored."""
        return self.num_correct / self.num_scored if self.num_scored else None

    @property
    def score_mean(self) -> float | None:
        """None where none was scored."""
        return self.score_sum / self.num_scored if self.num_scored else None

    def metrics(self) -> dict[str, float]:
        """Under their names in metrics.jsonl; without scores, only the count of what was not scored."""
        metrics: dict[str, float] = {"eval/num_unscored": self.num_unscored}
        if self.accuracy is not None and self.score_mean is not None:
            metrics |= {"eval/accuracy": self.accuracy, "eval/score_mean": self.score_mean}
        return metrics

    def __str__(self) -> str:
        if self.accuracy is None:
            return f"held-out accuracy unknown: none of {self.num_unscored} responses was scored"
        return f"held-out accuracy {self.accuracy:.3f}, mean score {self.score_mean:.3f}"
