"""The values of metrics.jsonl, and their definitions."""

from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard

import msgspec
import numpy as np

from forgeasync.observability import TOPICS, definition_of
from forgeasync.plugins.viewer.appended_lines import Piece

STEP = "step"
ELAPSED_S = "time/elapsed_s"

HEADLINES = (
    "eval/accuracy",
    "reward/mean",
    "response/length_mean",
    "off_policy/age_mean",
    "mismatch/logprob_abs_mean",
    "grad_norm",
    "time/step_s",
    "time/wait_for_batch_s",
    "throughput/generated_tokens_per_s",
)
"""Metrics in the overview, which are also the counters of a trace file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One metric over the steps. Shape suffix: N lines that have it, in the file's order."""

    steps_N: np.ndarray
    """int64."""
    values_N: np.ndarray
    """float64, finite."""


class MetricTable:
    """All lines so far; uses 16 bytes per value."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_damaged = 0
        """Number of lines that are not a JSON object with a step."""
        self._steps: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}

    def add(self, piece: Piece) -> None:
        """Add the next lines; damaged lines are counted and skipped."""
        for line in piece.lines():
            self._add_line(line)

    def _add_line(self, line: bytes) -> None:
        try:
            record = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            record = None
        step = record.get(STEP) if isinstance(record, dict) else None
        if not isinstance(record, dict) or not _is_count(step):
            self.num_damaged += 1
            return
        self.num_lines += 1
        for key, value in record.items():
            # null represents a value that was not finite; the run has counted it.
            if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
                if key not in self._steps:
                    self._steps[key], self._values[key] = array("q"), array("d")
                self._steps[key].append(step)
                self._values[key].append(value)

    @property
    def keys(self) -> list[str]:
        """Names of all metrics so far, in the order of their first appearance."""
        return list(self._steps)

    @property
    def step(self) -> int:
        """Step of the last line; 0 before the first step."""
        newest = self.newest(STEP)
        return 0 if newest is None else newest[0]

    def column(self, key: str) -> Column:
        """Return the values of a key; empty if no line has it."""
        return Column(
            steps_N=np.array(self._steps.get(key, ()), dtype=np.int64),
            values_N=np.array(self._values.get(key, ()), dtype=np.float64),
        )

    def by_step(self, key: str) -> dict[int, float]:
        """Return the values of a key by step; the newest one, if a step has several."""
        return dict(zip(self._steps.get(key, ()), self._values.get(key, ()), strict=True))

    def newest(self, key: str) -> tuple[int, float] | None:
        """Return the step and the value of the last line that has a key."""
        if key not in self._steps:
            return None
        return self._steps[key][-1], self._values[key][-1]


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


@lru_cache(maxsize=4096)
def meaning_of(key: str) -> str | None:
    """Return the definition of a key of metrics.jsonl; None if this version of forgeasync has none."""
    definition = definition_of(key)
    return None if definition is None else definition.meaning


def glossary() -> list[dict[str, object]]:
    """Return all topics with their metrics, as JSON types."""
    return [
        {
            "heading": topic.heading,
            "note": topic.note,
            "metrics": [
                {"key": metric.key, "meaning": metric.meaning, "when": metric.when}
                for metric in topic.metrics
            ],
        }
        for topic in TOPICS
    ]
