"""The values of metrics.jsonl."""

from array import array
from typing import TypeGuard

import msgspec

from forgeasync.plugins.viewer.appended_lines import Piece

STEP = "step"
ELAPSED_S = "time/elapsed_s"

MAIN_METRICS = (
    *("policy_version", "eval/accuracy", "reward/mean", "response/length_mean"),
    *("off_policy/age_mean", "off_policy/age_max", "mismatch/logprob_abs_mean", "grad_norm"),
    *("time/step_s", "time/wait_for_batch_s", "load/trainer_wait_share"),
    *("throughput/train_tokens_per_s", "throughput/generated_tokens_per_s", "generator/num_healthy"),
)
"""Metrics whose newest values are part of a run's status, and which are the counters of a trace file."""


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

    def by_step(self, key: str) -> dict[int, float]:
        """Return the values of a key by step; the newest one, if a step has several."""
        return dict(zip(self._steps.get(key, ()), self._values.get(key, ()), strict=True))

    def tail(self, key: str, num_lines: int) -> list[tuple[int, float]]:
        """Return the step and the value of the last lines that have a key, oldest first."""
        steps, values = self._steps.get(key, ()), self._values.get(key, ())
        return list(zip(steps[-num_lines:], values[-num_lines:], strict=True))

    def newest(self, key: str) -> tuple[int, float] | None:
        """Return the step and the value of the last line that has a key."""
        return next(iter(self.tail(key, 1)), None)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
