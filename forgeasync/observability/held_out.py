"""What an evaluation on problems that are not trained on found."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScores:
    """Counts over one response to each held-out problem; those that could not be scored are counted apart."""

    num_correct: int
    score_sum: float
    """Partial credit included."""
    num_scored: int
    num_unscored: int
    parts: Mapping[str, float] = field(default_factory=dict)
    """Means of the scores' parts, by name."""
    sets: Mapping[str, "HeldOutScores"] = field(default_factory=dict)
    """The same for every set of ``evaluation.sets``, by name."""

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
        metrics |= {f"{prefix}/reward/{name}": mean for name, mean in self.parts.items()}
        for name, scores in self.sets.items():
            metrics |= scores.metrics(f"{prefix}/{name}")
        return metrics

    def __str__(self) -> str:
        if self.accuracy is None:
            text = f"held-out accuracy unknown: none of {self.num_unscored} responses was scored"
        else:
            text = f"held-out accuracy {self.accuracy:.3f}, mean score {self.score_mean:.3f}"
        for name, scores in self.sets.items():
            text += f"; {name} " + ("unknown" if scores.accuracy is None else f"{scores.accuracy:.3f}")
        return text
