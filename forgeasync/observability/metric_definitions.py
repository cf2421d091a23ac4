"""Every metric of a run. docs/metrics.md is generated from here:

python -m forgeasync.observability.metric_definitions > docs/metrics.md
"""

from collections.abc import Iterable

from forgeasync.observability.bad_step_metrics import BAD_STEPS
from forgeasync.observability.episode_metrics import EPISODES
from forgeasync.observability.fault_metrics import FAULTS
from forgeasync.observability.metric import Metric, Reporter, as_markdown
from forgeasync.observability.operation_metrics import OPERATION_TOPICS
from forgeasync.observability.serving_metrics import SERVING
from forgeasync.observability.teacher_metrics import TEACHERS
from forgeasync.observability.training_metrics import TRAINING_TOPICS

TOPICS = (*TRAINING_TOPICS, *OPERATION_TOPICS, EPISODES, SERVING, TEACHERS, FAULTS, BAD_STEPS)

METRICS = tuple(metric for topic in TOPICS for metric in topic.metrics)

TRAINER_KEYS = frozenset(metric.key for metric in METRICS if metric.required_of is Reporter.TRAINER)
"""What the trainer has to report for every step."""

REQUIRED_KEYS = frozenset(metric.key for metric in METRICS if metric.required_of is not None)
"""Keys without which no step is written."""

INTRODUCTION = """\
# Metrics

A run writes one JSON object a step to `metrics.jsonl`, and the same numbers to `tensorboard/`. In a key, a
word in angle brackets stands for any name. Counts "so far" start at 0 whenever the command starts; in a
resumed run only those under `buffer/` and `accounting/` go on. Values that are nan or infinite are null, and
counted in `metrics/num_nonfinite`.

The evaluation before the first step has a line of its own, with `step` 0, `policy_version` 0, the metrics of
the evaluation, `time/eval_s`, `time/elapsed_s` (0) and the metrics under `metrics/`.

With `logging.wandb: {project: NAME, entity: null, mode: online}` Weights & Biases gets the same lines and the
config, with `step` as the axis. `mode: offline` needs no network: its files are in the run's `wandb/`, and
`wandb sync` sends them later. A process of its own talks to W&B. Where that fails, hangs or dies, the run
says so once, counts the lines (`metrics/num_wandb_errors`), and goes on; its end waits for 10 s at most.

Code of your own (an objective, a correction) may report further names; they are not listed here.

This page is generated from `forgeasync/observability/training_metrics.py`, `operation_metrics.py`,
`episode_metrics.py`, `serving_metrics.py`, `teacher_metrics.py`, `fault_metrics.py`,
`bad_step_metrics.py` and `prediction_metrics.py` by `make docs`.
"""


def definition_of(key: str) -> Metric | None:
    """The metric that a key of metrics.jsonl belongs to; one with exactly that key goes before a pattern."""
    found = [metric for metric in METRICS if metric.matches(key)]
    return min(found, key=lambda metric: metric.is_pattern, default=None)


def undefined(keys: Iterable[str]) -> list[str]:
    """Keys that no definition covers, sorted."""
    return sorted(key for key in keys if definition_of(key) is None)


def markdown() -> str:
    """The text of docs/metrics.md."""
    return "\n".join([INTRODUCTION, *map(as_markdown, TOPICS)])


if __name__ == "__main__":
    print(markdown(), end="")
