"""Decides whether an ended run is restarted: a pure state machine for ``controller/supervisor.py``."""

import signal
from dataclasses import dataclass

from forgeasync.runtime.bootstrap_main import STOP_SIGNALS
from forgeasync.schema import EXIT_FAILED, EXIT_REFUSED, EXIT_SIGNAL

MAX_STARTS_WITHOUT_STEP = 5
"""Maximum number of consecutive starts that make no new step; after that the supervisor gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of one start of a run."""

    exit_code: int
    """Exit code as in ``subprocess``: negative after a signal."""
    stopped_by: signal.Signals | None
    """Signal that told the supervisor to stop; None if there was none."""
    newest_step: int
    """Newest step that the run has recorded, over all starts; 0: none."""
    has_ended: bool
    """Whether the run has made all its steps and exported its model, regardless of what came after."""
    words: str
    """Description of the ending, such as "was killed by SIGKILL"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Decision to end the supervision."""

    exit_code: int
    words: str | None = None
    """Message for the user; None: the run itself has reported its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Decision to restart the run, because it has died."""


Decision = End | Restart


def is_death(ending: Ending) -> bool:
    """Return whether a run has ended for another reason than completion, refusal or its user."""
    return ending.stopped_by is None and ending.exit_code not in (
        0,
        EXIT_REFUSED,
        *(EXIT_SIGNAL + one for one in STOP_SIGNALS),
        # The signal can arrive before the run handles it.
        *(-one for one in STOP_SIGNALS),
    )


class RestartPolicy:
    """Decides after each start of one run whether to restart it."""

    def __init__(self, newest_step: int) -> None:
        """``newest_step`` is the newest step that was recorded before the first start."""
        self._newest_step = newest_step
        self._num_without_step = 0

    def after(self, ending: Ending) -> Decision:
        """Record the ending of a start; return what to do."""
        if not is_death(ending):
            return End(exit_code=_exit_code(ending))
        if ending.has_ended:
            return End(exit_code=0, words=f"the run {ending.words}, after it had done everything")
        if ending.newest_step > self._newest_step:
            self._newest_step, self._num_without_step = ending.newest_step, 0
        else:
            self._num_without_step += 1
        if self._num_without_step < MAX_STARTS_WITHOUT_STEP:
            return Restart()
        return End(
            exit_code=EXIT_FAILED,
            words=f"failed: {MAX_STARTS_WITHOUT_STEP} starts in a row made no new step (the newest one is "
            f"{self._newest_step}); the last one {ending.words}",
        )


def _exit_code(ending: Ending) -> int:
    if ending.exit_code >= 0:
        return ending.exit_code
    return EXIT_SIGNAL + (-ending.exit_code if ending.stopped_by is None else ending.stopped_by)
