"""How long a run will go on: its steps and its evaluations take their time separately."""


class RemainingTime:
    """Estimates from the steps that this process has made; a run that was resumed begins anew."""

    def __init__(self, max_steps: int, eval_every_steps: int | None) -> None:
        """Evaluations come every ``eval_every_steps`` steps and after the last; None: there are none."""
        self._max_steps = max_steps
        self._eval_every_steps = eval_every_steps
        self._step = 0
        self._elapsed_s: float | None = None
        self._num_steps = 0
        self._steps_s = 0.0
        self._num_evals = 0
        self._evals_s = 0.0

    def add(self, step: int, *, elapsed_s: float, step_s: float, eval_s: float) -> None:
        """A step was made at ``elapsed_s`` of the run's clock; its ``eval_s`` is 0 without an evaluation."""
        if self._elapsed_s is None:
            # The clock of a resumed run has also counted its set-up.
            self._elapsed_s = 0.0 if step == 1 else elapsed_s - step_s
        # By the clock, not by the sum of steps: what lies between them takes time too.
        self._steps_s += elapsed_s - self._elapsed_s - eval_s
        self._num_steps += 1
        self._elapsed_s = elapsed_s
        self._step = step
        if eval_s > 0.0:
            self._evals_s += eval_s
            self._num_evals += 1

    def add_evaluation(self, eval_s: float) -> None:
        """An evaluation outside of a step: the one before the first."""
        self._evals_s += eval_s
        self._num_evals += 1

    def estimate_s(self) -> float:
        """Seconds until the last step has been made and evaluated; there has been one step at least."""
        steps_s = self._steps_s / self._num_steps * (self._max_steps - self._step)
        if not self._num_evals:
            return steps_s
        return steps_s + self._evals_s / self._num_evals * self._num_evals_left()

    def _num_evals_left(self) -> int:
        if self._eval_every_steps is None:
            return 0
        num_evals = self._max_steps // self._eval_every_steps - self._step // self._eval_every_steps
        is_last_extra = self._max_steps % self._eval_every_steps != 0 and self._step < self._max_steps
        return num_evals + is_last_extra
