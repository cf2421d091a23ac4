"""The numbers of metrics.jsonl by key."""

from array import array
from dataclasses import dataclass

import msgspec
import numpy as np

STEP = "step"
ELAPSED_S = "time/elapsed_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One metric of a run over its steps. Shape suffix: N lines that have it, in the file's order."""

    steps_N: np.ndarray
    """int64."""
    values_N: np.ndarray
    """float64, finite."""


class MetricTable:
    """All lines so far. Memory: 16 bytes a number."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_damaged = 0
        """Lines that are no object with a step."""
        self.last: dict[str, float] = {}
        """The newest value of every key."""
        self._steps: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}

    def add(self, line: bytes) -> None:
        """Take the next line; one that is damaged is counted and left out."""
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
            # null stands for a value that was not finite; the run has counted it.
            if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
                if key not in self._steps:
                    self._steps[key], self._values[key] = array("q"), array("d")
                self._steps[key].append(step)
                self._values[key].append(value)
                self.last[key] = value

    @property
    def keys(self) -> list[str]:
        """The names of all metrics so far, in the order in which they came."""
        return list(self._steps)

    @property
    def step(self) -> int:
        """The step of the last line; 0 before the first step."""
        return int(self.last.get(STEP, 0))

    def column(self, key: str) -> Column:
        """The values of a key; empty where no line has it."""
        return Column(
            steps_N=np.array(self._steps.get(key, ()), dtype=np.int64),
            values_N=np.array(self._values.get(key, ()), dtype=np.float64),
        )

    def newest(self, key: str) -> tuple[int, float] | None:
        """Step and value of the last line that has a key."""
        if key not in self._steps:
            return None
        return self._steps[key][-1], self._values[key][-1]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
