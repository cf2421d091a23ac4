"""What bounds a run and what would help, from its files (docs/simulation.md)."""

import sys

from forgeasync.observability import (
    KEYS,
    OTHER_KEYS,
    WINDOW_STEPS,
    MeasuredSteps,
    MeasuredWindow,
    num_steps_ahead,
    verdict_lines,
)
from forgeasync.viewer.run_reader import RunReader


def verdict_of(run: RunReader) -> list[str]:
    """Return the lines of the verdict."""
    return verdict_lines(_measured(run))


def _measured(run: RunReader) -> MeasuredSteps | None:
    """The means over the newest steps; None where there are too few.

    Where the config cannot be read, no steps are left out at the end.
    """
    num_ahead = num_steps_ahead(
        max_off_policy_steps=run.whole_setting("max_off_policy_steps") or 0,
        max_groups=run.whole_setting("buffer.max_groups"),
        groups_per_step=run.whole_setting("algorithm.groups_per_step") or 1,
    )
    max_steps = run.whole_setting("max_steps") or sys.maxsize
    window = MeasuredWindow.of_run(max_steps, num_steps_ahead=num_ahead)
    num_lines = WINDOW_STEPS + window.num_left_out + num_ahead + 1
    lines: dict[int, dict[str, float]] = {}
    for key in (*KEYS, *OTHER_KEYS):
        column = run.metrics.column(key)
        for step, value in zip(
            column.steps_N[-num_lines:].tolist(), column.values_N[-num_lines:].tolist(), strict=True
        ):
            lines.setdefault(step, {})[key] = value
    for _, line in sorted(lines.items()):
        # The evaluation before the first step has a line without a step's times.
        if line.keys() >= set(KEYS):
            window.add(line)
    return window.measured()
