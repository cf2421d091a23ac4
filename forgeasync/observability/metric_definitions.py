"""Registry of all metrics of a run. The definitions are data, in ``metric_definitions.yaml``.

docs/metrics.md is generated from the definitions:

    python -m forgeasync.observability.metric_definitions > docs/metrics.md
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from forgeasync.observability.run_log import exit_with

_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader

_PLACEHOLDER = re.compile(r"<\w+>")

EVERY_STEP = "every step"
"""Lines that have most metrics; their column in the tables is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One key of metrics.jsonl, or a pattern of keys."""

    key: str
    """Name of the metric. ``<set>`` is any name without a slash, and so are others in angle brackets, but
    ``<part>`` may have slashes: ``reward/<part>``."""
    meaning: str
    """Description as a complete sentence, with the unit unless the metric is a share or a count."""
    when: str = EVERY_STEP
    """Lines of metrics.jsonl that have the metric."""
    is_required: bool = False
    """Whether a step without the metric is refused. Not for patterns."""

    @property
    def is_pattern(self) -> bool:
        """Whether ``key`` is a pattern for several keys."""
        return _PLACEHOLDER.search(self.key) is not None

    def matches(self, key: str) -> bool:
        """Whether ``key`` is this metric's key or matches its pattern."""
        names = re.escape(self.key).replace("<part>", ".+")
        return re.fullmatch(_PLACEHOLDER.sub("[^/]+", names), key) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """Group of related metrics, a section of docs/metrics.md."""

    heading: str
    metrics: tuple[Metric, ...]
    note: str = ""
    """Text that applies to all metrics of the topic."""


def _read_topics() -> tuple[Topic, ...]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.load(text, Loader=_LOADER), tuple[Topic, ...])


TOPICS = _read_topics()
"""All topics of metric_definitions.yaml, in order."""

METRICS = tuple(metric for topic in TOPICS for metric in topic.metrics)
"""All metrics of metric_definitions.yaml, in order."""

REQUIRED_KEYS = frozenset(metric.key for metric in METRICS if metric.is_required)
"""Keys that every step must have."""

INTRODUCTION = """\
# Metrics

A run writes one JSON object per step to `metrics.jsonl`, and the same numbers to `tensorboard/`. Each table
has the key, its meaning, and the lines that have it (all lines, if the column is empty). A word in angle
brackets stands for any name.

- A count that starts with "Total" adds up since the command started. In a resumed run those under `buffer/`,
  `accounting/` and `faults/` continue; the others start at 0.
- Values that are nan or infinite are null, and counted in `metrics/num_nonfinite`.
- The evaluation before training has its own line with `step` 0 and `policy_version` 0. It has the metrics
  of the evaluation, `time/eval_s`, `time/elapsed_s` (0) and those under `metrics/`.
- Your own objectives and corrections can report more names.

With `logging.wandb: {project: NAME, entity: null, mode: online}`, Weights & Biases gets the same lines and
the config, with `step` as the axis. `mode: offline` needs no network; `wandb sync` uploads the run's
`wandb/` folder later. W&B runs in its own process. If that fails, hangs or dies, the run says so once,
counts the lines (`metrics/num_wandb_errors`) and continues; its end waits up to 10 s.

This page is generated from `forgeasync/observability/metric_definitions.yaml` by `make docs`.
"""


def definition_of(key: str) -> Metric | None:
    """Return the definition of a key of metrics.jsonl, if any. Exact keys take precedence over patterns."""
    found = [metric for metric in METRICS if metric.matches(key)]
    return min(found, key=lambda metric: metric.is_pattern, default=None)


def undefined(keys: Iterable[str]) -> list[str]:
    """Return the keys that no definition covers, sorted."""
    return sorted(key for key in keys if definition_of(key) is None)


def markdown() -> str:
    """Return the text of docs/metrics.md: the introduction, then heading, note and table of each topic."""
    return "\n".join([INTRODUCTION, *map(_section, TOPICS)])


def _section(topic: Topic) -> str:
    rows = [("key", "meaning", "only on"), ("---", "---", "---")]
    for metric in topic.metrics:
        rows.append((f"`{metric.key}`", metric.meaning, "" if metric.when == EVERY_STEP else metric.when))
    escaped = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    table = "\n".join(f"| {' | '.join(row)} |" for row in escaped)
    note = f"{topic.note}\n\n" if topic.note else ""
    return f"## {topic.heading}\n\n{note}{table}\n"


def main() -> int:
    """Print the page; return the exit code."""
    print(markdown(), end="")
    return 0


if __name__ == "__main__":
    exit_with(main)
