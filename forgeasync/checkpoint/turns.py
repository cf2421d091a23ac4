"""When a run writes its checkpoints: a state machine without a clock and without files."""

FIRST_RETRY_S = 1.0
"""Seconds from a checkpoint that could not be written to the next attempt.

Each failure in a row doubles them."""

MAX_RETRY_S = 30.0
"""Most seconds between two attempts."""


class CheckpointTurns:
    """Says after which steps a checkpoint is due: every ``every_steps`` steps, after the last one, and where
    one that could not be written is still owed."""

    def __init__(self, every_steps: int | None, *, last_step: int) -> None:
        """``every_steps`` None: no checkpoint is ever due."""
        self._every_steps = every_steps
        self._last_step = last_step
        self._num_failures = 0
        """In a row."""
        self._retry_at_s: float | None = None

    def is_turn(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is due, whatever became of those before."""
        if self._every_steps is None:
            return False
        return step % self._every_steps == 0 or step == self._last_step

    @property
    def is_owed(self) -> bool:
        """Whether the checkpoint that was begun last could not be written."""
        return self._retry_at_s is not None

    def is_retry_due(self, now_s: float) -> bool:
        """Whether the checkpoint that is owed can be tried again at ``now_s``."""
        return self._retry_at_s is not None and now_s >= self._retry_at_s

    def written(self) -> None:
        """Take note that the checkpoint begun last is whole."""
        self._num_failures, self._retry_at_s = 0, None

    def refused(self, now_s: float) -> None:
        """Take note that a disk has refused the checkpoint begun last."""
        self._retry_at_s = now_s + min(MAX_RETRY_S, FIRST_RETRY_S * 2**self._num_failures)
        self._num_failures += 1

    def lost(self, now_s: float) -> None:
        """Take note that the checkpoint begun last was lost with its trainer: another can begin at once."""
        self._num_failures, self._retry_at_s = 0, now_s
