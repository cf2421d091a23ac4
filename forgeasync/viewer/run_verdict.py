"""What bounds a run and what would help, from its files (docs/simulation.md)."""

from forgeasync.prediction.measured import (
    KEYS,
    NUM_GENERATORS,
    WINDOW_STEPS,
    MeasuredSteps,
    MeasuredWindow,
    num_first_steps,
)
from forgeasync.prediction.record import NUM_SIMULATED_STEPS
from forgeasync.prediction.verdict import bound_words, verdict_lines
from forgeasync.viewer.run_reader import RunReader


def verdict_of(run: RunReader, max_steps: int | None) -> list[str]:
    """Return the lines of the verdict; ``max_steps`` is the run's, where its config says it."""
    measured = _measured(run, num_first_steps(NUM_SIMULATED_STEPS if max_steps is None else max_steps))
    if run.prediction is None and run.settings.get("prediction.profile") is not None:
        return [bound_words(measured), "nothing has been predicted yet"]
    return verdict_lines(measured, run.prediction)


def _measured(run: RunReader, num_left_out: int) -> MeasuredSteps | None:
    """The means over the newest steps; None where there are too few."""
    num_lines = WINDOW_STEPS + num_left_out + 1
    lines: dict[int, dict[str, float]] = {}
    for key in (*KEYS, NUM_GENERATORS):
        column = run.metrics.column(key)
        for step, value in zip(
            column.steps_N[-num_lines:].tolist(), column.values_N[-num_lines:].tolist(), strict=True
        ):
            lines.setdefault(step, {})[key] = value
    window = MeasuredWindow(num_left_out=num_left_out)
    for _, line in sorted(lines.items()):
        # The evaluation before the first step has a line without a step's times.
        if line.keys() >= set(KEYS):
            window.add(line)
    return window.measured()
