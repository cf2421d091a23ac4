"""Optimizer steps that would spoil the weights: how a spike is found, and how many a run survives. Pure."""

import statistics
from collections import deque
from collections.abc import Sequence

from forgeasync.trainer.step_result import StepResult


class SpikeRule:
    """Finds gradient norms that are far above those of the steps before.

    A norm is a spike if it is more than ``factor`` times the median of the last ``window`` norms. Only those
    of steps that were made, and had a gradient at all, count. Before there are so many, nothing is a spike.
    """

    def __init__(self, *, factor: float, window: int) -> None:
        self.window = window
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=window)

    @property
    def norms(self) -> Sequence[float]:
        """The norms that the next one is compared with, the oldest first: all that the rule remembers."""
        return list(self._norms)

    def take_over(self, norms: Sequence[float]) -> None:
        """Go on from what ``norms`` was."""
        self._norms = deque(norms, maxlen=self.window)

    @property
    def limit(self) -> float | None:
        """The largest norm that is no spike; None while there are too few to tell."""
        if len(self._norms) < self.window:
            return None
        return self._factor * statistics.median(self._norms)

    def describe(self, norm: float) -> str | None:
        """What is wrong with a norm; None if it is no spike."""
        limit = self.limit
        if limit is None or norm <= limit:
            return None
        return (
            f"the norm of all gradients is {norm:.4g}, more than {limit:.4g}: trainer.bad_steps.spike_factor "
            f"= {self._factor:g} times the median of the last {self.window} steps"
        )

    def made(self, norm: float) -> None:
        """A step with this norm was made."""
        if norm > 0.0:
            self._norms.append(norm)


class BadStepsEndRun(RuntimeError):
    """The config lets a run go on after bad steps, but not after this one."""


class BadStepWatch:
    """Lets a run go on after a bad step, but not for ever."""

    def __init__(self, max_in_a_row: int) -> None:
        """So many batches in a row with a bad step are too many (``trainer.bad_steps.max_in_a_row``)."""
        assert max_in_a_row > 0
        self._max_in_a_row = max_in_a_row
        self._num_in_a_row = 0

    def count(self, step: int, result: StepResult) -> None:
        """Take note of a batch.

        Raises:
            BadStepsEndRun: its bad step is one too many in a row, or is to end the run at once.
        """
        self._num_in_a_row = 0 if result.skip_reason is None else self._num_in_a_row + 1
        if result.ends_run:
            raise BadStepsEndRun(
                f"step {step} was not made, which ends the run by trainer.bad_steps: {result.skip_reason}"
            )
        if self._num_in_a_row >= self._max_in_a_row:
            raise BadStepsEndRun(
                f"{self._num_in_a_row} steps in a row were bad (trainer.bad_steps.max_in_a_row); "
                f"the last one, {step}, because {result.skip_reason}"
            )
