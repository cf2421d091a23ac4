"""When the lines of a ledger were written, as far as the steps' times say it: the ledger has no times."""

import numpy as np

from forgeasync.viewer.group_lives import GroupLives
from forgeasync.viewer.metric_table import ELAPSED_S, MetricTable


class RunClock:
    """Seconds on the run's own clock (``time/elapsed_s``) by lines of the ledger.

    The line of a trained step has the step's time. Between two steps time is taken to pass evenly over the
    lines, so what is said of other lines is right to a step.
    """

    def __init__(self, lives: GroupLives, metrics: MetricTable) -> None:
        lines_N, steps_N = lives.trained_lines()
        # Of a step that was made again after a resumption, the last one stands.
        steps, index = np.unique(steps_N[::-1], return_index=True)
        elapsed = metrics.column(ELAPSED_S)
        known = np.isin(steps, elapsed.steps_N)
        lines = lines_N[::-1][index][known]
        by_step = dict(zip(elapsed.steps_N.tolist(), elapsed.values_N.tolist(), strict=True))
        times = np.array([by_step[step] for step in steps[known].tolist()], dtype=np.float64)
        order = np.argsort(lines)
        self._lines = np.concatenate([[1], lines[order]]).astype(np.float64)
        self._times = np.concatenate([[0.0], np.maximum.accumulate(times[order])])
        opened = lives.opened
        self._begins_late = opened is not None and opened.step > 0

    def about_s(self, line: int | None) -> float | None:
        """Return the time of a line; None where no two steps are around it."""
        if line is None or not self._lines[0] <= line <= self._lines[-1] or len(self._lines) < 2:
            return None
        if self._begins_late and line < self._lines[1]:
            return None
        return float(np.interp(line, self._lines, self._times))
