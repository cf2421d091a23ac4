"""What a metric is: its key in metrics.jsonl, what it says, and on which lines it is."""

import re
from dataclasses import dataclass
from enum import Enum

_PLACEHOLDER = re.compile(r"<\w+>")


class Reporter(Enum):
    """Who has to report a metric for every step."""

    LOOP = "the training loop"
    TRAINER = "the trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One key of metrics.jsonl, or a pattern of keys."""

    key: str
    """A part in angle brackets stands for any name without a slash: ``reward/<part>``."""
    meaning: str
    """A complete phrase, with the unit unless it is a share or a count."""
    when: str = "every step"
    """Which lines have it."""
    required_of: Reporter | None = None
    """None: the line is written without it."""

    def __post_init__(self) -> None:
        assert self.required_of is None or not self.is_pattern, "a pattern names no key that could be missing"

    @property
    def is_pattern(self) -> bool:
        """Whether it stands for several keys."""
        return _PLACEHOLDER.search(self.key) is not None

    def matches(self, key: str) -> bool:
        """Whether ``key`` is this metric's, or one of its pattern."""
        literals = map(re.escape, _PLACEHOLDER.split(self.key))
        return re.fullmatch("[^/]+".join(literals), key) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """Metrics that belong together."""

    heading: str
    metrics: tuple[Metric, ...]
    note: str = ""
    """What is true of all of them."""


def as_markdown(topic: Topic) -> str:
    """The heading, the note and a table."""
    rows = [("key", "meaning", "on lines of"), ("---", "---", "---")]
    rows += [(f"`{metric.key}`", metric.meaning, metric.when) for metric in topic.metrics]
    escaped = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    table = "\n".join(f"| {' | '.join(row)} |" for row in escaped)
    note = f"{topic.note}\n\n" if topic.note else ""
    return f"## {topic.heading}\n\n{note}{table}\n"
