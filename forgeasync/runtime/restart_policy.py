"""Whether a run that has ended is started again: a pure state machine; ``controller/supervisor.py`` is its
shell."""

import signal
from dataclasses import dataclass

from forgeasync.runtime.bootstrap_main import STOP_SIGNALS
from forgeasync.schema import EXIT_FAILED, EXIT_REFUSED, EXIT_SIGNAL

MAX_STARTS_WITHOUT_STEP = 5
"""So many starts in a row that make no step which none before them has made end the supervision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a start of a run has ended."""

    exit_code: int
    """As ``subprocess`` has it: less than 0 after a signal."""
    stopped_by: signal.Signals | None
    """What has told the supervisor to stop, if anything has."""
    newest_step: int
    """The newest step that the run has recorded, over all starts; 0: none."""
    has_ended: bool
    """Whether the run has made all its steps and exported its model, whatever came after."""
    words: str
    """Why it has ended, such as "was killed by SIGKILL"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The supervision ends."""

    exit_code: int
    words: str | None = None
    """What is left to say; None: the run itself has said it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The run has died, and is started again."""


Decision = End | Restart


def is_death(ending: Ending) -> bool:
    """Whether a run has ended in another way than done, refused or stopped by its user."""
    return ending.stopped_by is None and ending.exit_code not in (
        0,
        EXIT_REFUSED,
        *(EXIT_SIGNAL + one for one in STOP_SIGNALS),
        # One that comes before the run handles it.
        *(-one for one in STOP_SIGNALS),
    )


class RestartPolicy:
    """Decides after each start of one run."""

    def __init__(self, newest_step: int) -> None:
        """``newest_step`` is what the run had recorded before the first start."""
        self._newest_step = newest_step
        self._num_without_step = 0

    def after(self, ending: Ending) -> Decision:
        """Take in how a start has ended."""
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
